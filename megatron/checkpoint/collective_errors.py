"""Steps whose errors are raised on all ranks: a UserError on one rank becomes the same UserError on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.common.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


def on_all_ranks(step: Callable[[], T]) -> T:
    """Run ``step()`` on every rank; its result on this one. Raises a UserError of any rank on all: of the first one."""
    outcome, size = _outcome(step), dist.get_world_size()
    failed = torch.tensor(
        [size if outcome[1] is None else dist.get_rank()], device=get_accelerator().current_device_name()
    )
    dist.all_reduce(failed, dist.ReduceOp.MIN)
    if (first := int(failed)) < size:
        dist.broadcast_object_list(outcomes := [outcome], src=first)
        (outcome,) = outcomes
    return _result(outcome)


def gathered_on_rank_0(step: Callable[[], T], then: Callable[[list[T]], R]) -> R:
    """Run ``step()`` on every rank, and ``then`` with its results on rank 0; the result of ``then``, on every rank.

    Raises a UserError of any on all ranks.
    """
    outcomes = gathered([_outcome(step)])
    return on_rank_0(lambda: then([_result(outcome) for outcome in outcomes]))


def gathered(own: list[T]) -> list[T]:
    """On rank 0 what all ranks have, in their order, by a binomial tree: of 16,384 ranks it receives from 14."""
    rank, size, step = dist.get_rank(), dist.get_world_size(), 1
    while step < size and not rank & step:
        if rank + step < size:
            received: list[list[T]] = [[]]
            dist.recv_object_list(received, rank + step, use_batch=True)  # else NCCL would connect each pair anew
            own = own + received[0]
        step *= 2
    if rank:
        dist.send_object_list([own], rank - step, use_batch=True)
    return own


def on_rank_0(step: Callable[[], T]) -> T:
    """Run ``step()`` on rank 0; its result, on every rank. Raises its UserError on all ranks."""
    outcome = [_outcome(step) if dist.get_rank() == 0 else ()]
    dist.broadcast_object_list(outcome)
    return _result(outcome[0])


def _outcome(step: Callable[[], T]) -> tuple:
    """(result, None, []) or (None, type of the UserError, its messages): an error may not survive pickling."""
    try:
        return step(), None, []
    except UserError as error:
        return None, type(error), error.messages


def _result(outcome: tuple) -> Any:
    result, kind, messages = outcome
    if kind is not None:
        error = kind(messages)
        error.on_every_rank = True
        raise error
    return result
