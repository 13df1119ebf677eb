"""Steps whose errors are raised on all ranks: a UserError on one rank becomes the same UserError on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.common.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


def on_all_ranks(step: Callable[[], T], group: ProcessGroup | None = None) -> list[T]:
    """Run ``step()`` on every rank; its results in the order of ranks. Raises a UserError of any rank on all."""
    outcomes: list[tuple] = [()] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(step), group=group)
    return [_result(outcome) for outcome in outcomes]


def gathered_on_rank_0(step: Callable[[], T], then: Callable[[list[T]], R]) -> R:
    """Run ``step()`` on every rank, and ``then`` with its results on rank 0; the result of ``then``, on every rank.

    Other ranks receive neither results nor more than a message of their number. Raises a UserError of any on all ranks.
    """
    outcomes: list[tuple] | None = [()] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(_outcome(step), outcomes, dst=0)
    return on_rank_0(lambda: then([_result(outcome) for outcome in outcomes or ()]))


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
