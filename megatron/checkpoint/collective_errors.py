"""Steps whose errors are raised on all ranks: a UserError on one rank becomes the same UserError on every rank."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

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


def gathered_on_rank_0(step: Callable[[], T], then: Callable[[list[T]], R], groups: Sequence[ProcessGroup]) -> R:
    """Run ``step()`` on every rank, and ``then`` with its results on rank 0; the result of ``then``, on every rank.

    Results go along one axis after the other, by ``ParallelLayout.axis_groups``, so that no rank receives from more
    others than an axis has. Raises a UserError of any on all ranks.
    """
    outcomes = [_outcome(step)]
    for group in groups:
        parts: list[list[tuple]] | None = [[]] * group.size() if dist.get_rank(group) == 0 else None
        dist.gather_object(outcomes, parts, dst=dist.get_global_rank(group, 0), group=group)
        outcomes = [outcome for part in parts or () for outcome in part]
    return on_rank_0(lambda: then([_result(outcome) for outcome in outcomes]))


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
