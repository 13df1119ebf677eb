"""Collective error handling: a UserError of a step on one rank is raised on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.common.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


def on_all_ranks(step: Callable[[], T]) -> T:
    """Run ``step()`` on every rank. Returns this rank's result; a UserError of any rank is raised on all ranks."""
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
    """Run ``step()`` on every rank, and ``then`` with all results on rank 0. Returns its result on every rank.

    A UserError of any step or of ``then`` is raised on all ranks.
    """
    outcomes = gathered([_outcome(step)])
    return on_rank_0(lambda: then([_result(outcome) for outcome in outcomes]))


def gathered(own: list[T]) -> list[T]:
    """Gather the lists of all ranks on rank 0, in rank order, by a binomial tree: 14 receives for 16,384 ranks."""
    rank, size, step = dist.get_rank(), dist.get_world_size(), 1
    while step < size and not rank & step:
        if rank + step < size:
            received: list[list[T]] = [[]]
            dist.recv_object_list(received, rank + step, use_batch=True)  # else NCCL makes a communicator per pair
            own = own + received[0]
        step *= 2
    if rank:
        dist.send_object_list([own], rank - step, use_batch=True)
    return own


def on_rank_0(step: Callable[[], T]) -> T:
    """Run ``step()`` on rank 0. Returns its result, or raises its UserError, on every rank."""
    outcome = [_outcome(step) if dist.get_rank() == 0 else (None, None)]
    dist.broadcast_object_list(outcome)
    return _result(outcome[0])


def _outcome(step: Callable[[], T]) -> tuple[Any, UserError | None]:
    """(result, None) or (None, error)."""
    try:
        return step(), None
    except UserError as error:
        return None, error


def _result(outcome: tuple[Any, UserError | None]) -> Any:
    result, error = outcome
    if error is not None:
        error.on_every_rank = True
        raise error
    return result
