"""Rows of a table that is the output projection as well, and their gradient.

Autograd makes a gradient of the lookup that is as large as the table, nearly all of it zeros, and adds it to that of
the logits in a third. On a CPU, where each pass over such a tensor counts, the rows are added to the gradient of the
logits instead.

v rows of the table, h hidden
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def lookup(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens [..], table [v, h] -> hidden [.., h]."""
    if _adds_rows(table):
        return _Lookup.apply(tokens, table)
    return F.embedding(tokens, table)


def share_gradient_with_lookups(logits: Tensor, table: Tensor) -> Tensor:
    """``logits``, which a backward pass reaches before the lookups: these add to the gradient of ``table``."""
    if _adds_rows(table) and logits.requires_grad:
        logits.register_hook(partial(_note_pass, table))
    return logits


def _adds_rows(table: Tensor) -> bool:
    """Whether lookups add rows to a gradient of ``table``, and make none of its size."""
    return table.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _note_pass(table: Any, grad: Tensor) -> None:
    table.pass_of_logits = torch._C._current_graph_task_id()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = table  # of which no value is read
        ctx.size = table.size(0)  # at ZeRO 3 the table may be elsewhere when this is called
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (tokens,), table = ctx.saved_tensors, ctx.table
        if getattr(table, "accumulates_in_place", False) and table.grad is not None:
            _add_rows(table.grad, tokens, grad)
            return None, None
        if getattr(table, "pass_of_logits", None) == torch._C._current_graph_task_id():
            _add_before_accumulation(table, tokens, grad)
            return None, None
        return None, torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.size, -1, False)


def _add_before_accumulation(table: Tensor, tokens: Tensor, grad: Tensor) -> None:
    """Add the rows to the gradient that autograd accumulates at the end of this pass.

    A hook of the table does so. It is called before all hooks that were registered earlier, which see the whole
    gradient.
    """
    this_pass = torch._C._current_graph_task_id()

    def add(total: Tensor) -> None:
        handle.remove()
        if torch._C._current_graph_task_id() == this_pass:  # not if this pass failed, and left the hook
            _add_rows(total, tokens, grad)

    handle = table.register_hook(add)
    hooks: dict[int, Any] = table._backward_hooks  # type: ignore[assignment]  # has the one above
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)  # hooks are called in the order of this table


def _add_rows(total: Tensor, tokens: Tensor, grad: Tensor) -> None:
    total.index_add_(0, tokens.flatten(), grad.flatten(0, -2).to(total.dtype))
