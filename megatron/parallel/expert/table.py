"""The table of tokens and their k chosen experts, T x k rows, which experts compute sorted by expert.

T tokens, k chosen experts, h hidden, n rows in the order of the experts
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where the rows that experts compute are in the table."""

    numbers: Tensor
    """[n]: the row of the table; T x k for a row that only fills up a fixed size."""
    tokens: int
    k: int
    is_permutation: bool
    """Whether the n rows are exactly those of the table."""

    @property
    def size(self) -> int:
        """Rows of the table."""
        return self.tokens * self.k


def rows_of_tokens(x: Tensor, slots: Slots) -> Tensor:
    """x [T, h] -> [n, h]: each row a copy of its token."""
    rows: Tensor = _Rows.apply(x, slots)
    return rows


def sum_of_choices(outputs: Tensor, slots: Slots, weights: Tensor) -> Tensor:
    """Outputs [n, h], weights [T, k] -> [T, h]: for each token the weighted sum of its rows, zero for absent ones."""
    table: Tensor = _Table.apply(outputs, slots)
    return (weights.unsqueeze(1) @ table.view(slots.tokens, slots.k, -1)).squeeze(1)


class _Rows(torch.autograd.Function):
    """The gradient is a sum over choices, and so the same in every run; that of indexing would not be, on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, (slots.numbers // slots.k).clamp_(max=slots.tokens - 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _table(grad, ctx.slots).view(ctx.slots.tokens, ctx.slots.k, -1).sum(1), None


class _Table(torch.autograd.Function):
    """Rows that only fill up a fixed size may contain anything, and get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return _table(outputs, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        numbers, size = ctx.slots.numbers, ctx.slots.size
        rows = grad.index_select(0, numbers.clamp(max=size - 1))
        return rows if ctx.slots.is_permutation else rows.masked_fill_((numbers == size).unsqueeze(1), 0), None


def _table(rows: Tensor, slots: Slots) -> Tensor:
    """[n, h] -> [T x k, h], from one more row, which takes what belongs to none."""
    make = rows.new_empty if slots.is_permutation else rows.new_zeros
    return make((slots.size + 1, rows.size(1))).index_copy_(0, slots.numbers, rows)[: slots.size]
