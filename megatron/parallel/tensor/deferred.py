"""Weight gradients that are computed later than the gradients of inputs (Zero Bubble, arXiv 2401.10241).

The stage before waits for the gradient of a linear layer's input; nothing but the step waits for that of its weight.
A schedule that divides the backward pass lets ``linear`` put off the second product, and runs it in what would
otherwise be a bubble. Gradients of other parameters, such as norms and biases, are computed with those of the inputs.

With tensor parallelism a product that is not put off is computed while the ranks sum the gradient of the input. Of one
that is put off nothing is left to compute meanwhile: the first part of the backward pass waits for its sums. What
sequence parallelism gathers for the second part is gathered while the product before is computed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Product = Callable[[], Callable[[], Tensor | None]]
"""Starts the communication of a product; what it returns computes the gradient of a weight, or adds it to
``weight.grad`` and returns None."""


class DeferredProducts:
    """Collects the products that give the gradients of ``weights``."""

    def __init__(self, weights: Iterable[nn.Parameter]):
        self._collected: list[tuple[Product, Tensor]] | None = None
        for weight in weights:
            if getattr(weight, "deferred_products", self) is not None:
                weight.deferred_products = self  # type: ignore[attr-defined]  # a mark of ours on the parameter

    @contextmanager
    def collected(self) -> Iterator[list[tuple[Product, Tensor]]]:
        """While inside, backward passes put off the products of the weights into the list."""
        assert self._collected is None
        products: list[tuple[Product, Tensor]] = []
        self._collected = products
        try:
            yield products
        finally:
            self._collected = None

    @property
    def is_open(self) -> bool:
        """Whether a backward pass puts off products now."""
        return self._collected is not None

    def add(self, product: Product, weight: Tensor) -> None:
        """Put off ``product``, the gradient of ``weight``."""
        assert self._collected is not None
        self._collected.append((product, weight))


def compute_at_once(weight: nn.Parameter) -> None:
    """Never put off the product for ``weight``.

    That is for the output projection: the gradients of the logits are the largest tensors of a model, and would be kept
    for as many micro-batches as there are stages.
    """
    weight.deferred_products = None  # type: ignore[attr-defined]


def open_products(weight: Tensor) -> DeferredProducts | None:
    """Where the product for ``weight`` is to be put off to now; None if it is computed at once."""
    deferred: DeferredProducts | None = getattr(weight, "deferred_products", None)
    return deferred if deferred is not None and deferred.is_open else None


def run_products(products: list[tuple[Product, Tensor]]) -> None:
    """Compute the gradients that were put off, and empty the list. Hooks of the weights run as in a backward pass.

    The input of each product is gathered while the one before is computed.
    """
    products.reverse()
    following = _started(products)
    while following is not None:
        (compute, weight), following = following, _started(products)
        with torch.no_grad():
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
        del compute, gradient


def _started(products: list[tuple[Product, Tensor]]) -> tuple[Callable[[], Tensor | None], Tensor] | None:
    """The last product, taken from the list and started, and its weight."""
    if not products:
        return None
    start, weight = products.pop()
    return start(), weight
