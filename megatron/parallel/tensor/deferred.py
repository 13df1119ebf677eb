"""Weight gradients that are computed later than the gradients of inputs (Zero Bubble, arXiv 2401.10241).

The stage before waits for the gradient of a linear layer's input; nothing but the step waits for that of its weight.
A schedule that divides the backward pass lets ``linear`` put off the second product, and runs it in what would
otherwise be a bubble. Gradients of other parameters, such as norms and biases, are computed with those of the inputs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Product = Callable[[], Tensor | None]
"""Computes the gradient of a weight; None if it has added it to ``weight.grad``."""


class DeferredProducts:
    """Collects the products that give the gradients of ``weights``."""

    def __init__(self, weights: Iterable[nn.Parameter]):
        self._collected: list[tuple[Product, Tensor]] | None = None
        for weight in weights:
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


def open_products(weight: Tensor) -> DeferredProducts | None:
    """Where the product for ``weight`` is to be put off to now; None if it is computed at once."""
    deferred: DeferredProducts | None = getattr(weight, "deferred_products", None)
    return deferred if deferred is not None and deferred.is_open else None


def run_products(products: list[tuple[Product, Tensor]]) -> None:
    """Compute the gradients that were put off, and empty the list. Hooks of the weights run as in a backward pass."""
    products.reverse()
    while products:
        product, weight = products.pop()
        with torch.no_grad():
            gradient = product()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
