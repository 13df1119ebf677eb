"""Weight gradients that are computed later than the gradients of inputs (Zero Bubble, arXiv 2401.10241).

The stage before waits for the gradient of a linear layer's input; only the step waits for the gradient of its weight.
A schedule that splits the backward pass lets linear layers defer the second matmul, and runs it in what would otherwise
be a bubble. Gradients of other parameters, such as norms and biases, are computed with the gradients of the inputs. The
output projection is no ``DeferringModule``: gradients of logits are the largest tensors of a model, and would be kept
for as many micro-batches as there are stages.

With tensor parallelism a weight gradient that is not deferred is computed while the ranks sum the gradient of the
input. With a deferred one the first part of the backward pass waits for its sums. What sequence parallelism gathers for
the second part is gathered during the matmul before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WeightGradient = Callable[[], Callable[[], Tensor | None]]
"""Starts its communication; what it returns computes the gradient of a weight, or adds it to ``weight.grad`` and
returns None."""
Collected = list[tuple[WeightGradient, Tensor]]
"""Weight gradients that are not computed yet, and the weights."""


class DeferringModule(nn.Module):
    """A module that asks ``deferred``, where a schedule has set it, whether to compute weight gradients now."""

    deferred: "DeferredWeightGradients | None" = None

    def defer(self, gradient: Callable[[], Tensor | None], weight: Tensor) -> bool:
        """Defer a ``gradient`` that needs no communication; False if it is to be computed now."""
        if self.deferred is None or not self.deferred.is_open:
            return False
        self.deferred.add(lambda: gradient, weight)
        return True


class DeferredWeightGradients:
    """Collects the weight gradients of the modules in ``module`` that can defer them."""

    def __init__(self, module: nn.Module):
        self._collected: Collected | None = None
        for part in module.modules():
            if isinstance(part, DeferringModule):
                part.deferred = self

    @contextmanager
    def collected(self) -> Iterator[Collected]:
        """While inside, backward passes add weight gradients to the list, and do not compute them."""
        assert self._collected is None
        collected: Collected = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    @property
    def is_open(self) -> bool:
        """Whether a backward pass defers weight gradients now."""
        return self._collected is not None

    def add(self, gradient: WeightGradient, weight: Tensor) -> None:
        """Defer ``gradient``, which belongs to ``weight``."""
        assert self._collected is not None
        self._collected.append((gradient, weight))


def compute_weight_gradients(collected: Collected) -> None:
    """Compute deferred weight gradients, and empty the list. Hooks of the weights run as in a backward pass.

    The input of each matmul is gathered during the matmul before.
    """
    collected.reverse()
    following = _started(collected)
    while following is not None:
        (compute, weight), following = following, _started(collected)
        with torch.no_grad():
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
        del compute, gradient


def _started(collected: Collected) -> tuple[Callable[[], Tensor | None], Tensor] | None:
    """The last weight gradient, taken from the list and started, and its weight."""
    if not collected:
        return None
    start, weight = collected.pop()
    return start(), weight
