"""Deferred weight gradients: computed later than input gradients (split backward, Zero Bubble, arXiv 2401.10241).

The previous stage waits for the input gradient of a linear layer; only the optimizer step waits for its weight
gradient. A schedule that splits the backward pass lets linear layers defer the weight gradient, and computes it in a
pipeline bubble. Gradients of other parameters, such as norms and biases, are computed with the input gradients. The
output projection is not a ``DeferringModule``: gradients of logits are the largest tensors of a model, and would be
kept for several micro-batches.

With tensor parallelism a weight gradient that is not deferred overlaps with the all-reduce of the input gradient. With
deferred ones the input-gradient pass waits for its all-reduces. The all-gather of sequence parallelism for a deferred
weight gradient overlaps with the previous matmul.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WeightGradient = Callable[[], Callable[[], Tensor | None]]
"""Starts communication for a weight gradient, and returns a function that computes the gradient, or adds it to
``weight.grad`` and returns None."""
Collected = list[tuple[WeightGradient, Tensor]]
"""Deferred weight gradients and their weights."""


class DeferringModule(nn.Module):
    """Base class of modules that can defer weight gradients, to ``deferred`` if a schedule has set it."""

    deferred: "DeferredWeightGradients | None" = None

    def defer(self, gradient: Callable[[], Tensor | None], weight: Tensor) -> bool:
        """Defer a ``gradient`` without communication; returns False if it has to be computed now."""
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
        """A context in which backward passes add weight gradients to the list instead of computing them."""
        assert self._collected is None
        collected: Collected = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    @property
    def is_open(self) -> bool:
        """Whether weight gradients are deferred at the moment."""
        return self._collected is not None

    def add(self, gradient: WeightGradient, weight: Tensor) -> None:
        """Defer the ``gradient`` of ``weight``."""
        assert self._collected is not None
        self._collected.append((gradient, weight))


def compute_weight_gradients(collected: Collected) -> None:
    """Compute deferred weight gradients and empty the list. Hooks of the weights run as in a backward pass.

    The all-gather for each matmul overlaps with the previous matmul.
    """
    collected.reverse()
    started = _start_next(collected)
    while started is not None:
        (compute, weight), started = started, _start_next(collected)
        with torch.no_grad():
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
        del compute, gradient


def _start_next(collected: Collected) -> tuple[Callable[[], Tensor | None], Tensor] | None:
    """Pop the last weight gradient from the list and start its communication; None if the list is empty."""
    if not collected:
        return None
    start, weight = collected.pop()
    return start(), weight
