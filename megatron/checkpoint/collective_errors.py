"""Steps that all ranks take alike: what fails on one of them fails on all, with the same words."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron.config.errors import UserError

T = TypeVar("T")


def together(step: Callable[[], T]) -> list[T]:
    """``step()`` of every rank, in the order of ranks. A UserError on any rank is raised on all."""
    outcomes: list[tuple] = [()] * dist.get_world_size()
    dist.all_gather_object(outcomes, _outcome(step))
    return [_result(outcome) for outcome in outcomes]


def on_first(step: Callable[[], T]) -> T:
    """``step()``, which the first rank takes, on every rank. A UserError there is raised on all."""
    outcome = [_outcome(step) if dist.get_rank() == 0 else ()]
    dist.broadcast_object_list(outcome)
    return _result(outcome[0])


def _outcome(step: Callable[[], T]) -> tuple:
    try:
        return step(), None, []
    except UserError as error:
        return None, type(error), error.messages


def _result(outcome: tuple) -> T:
    result, kind, messages = outcome
    if kind is not None:
        error = kind(messages)
        error.on_every_rank = True
        raise error
    return result
