"""Run an engine, with or without pipeline stages: steps over global batches, evaluations, and what a step reports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from torch import Tensor

from megatron.common.errors import NumericsError
from megatron.data.loader import Batch
from megatron.engines.engine import Engine
from megatron.engines.overrides import replaced
from megatron.parallel.pipeline.schedule import InstructionHook


@dataclass(frozen=True)
class StepStatus:
    """What an engine reports after a step."""

    applied: bool
    """Whether the weights were updated; they are not if the gradient was not finite."""
    grad_norm: float | Tensor | None
    """2-norm of the gradient of the model, [] or a number, before clipping; None if the step was skipped."""
    loss_scale: float
    skipped_iterations: int
    """Iterations since the start of training whose gradients were not finite."""
    loss_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """The terms of the loss by name, [], averaged like the loss; none if the loss has a single one."""


def train_batch(engine: Engine, batches: Iterator[Batch] | None, hooks: Sequence[InstructionHook] = ()) -> Tensor:
    """Run one optimizer step over a global batch. Returns its loss, the same on every rank.

    Raises NumericsError if gradients overflow at the smallest loss scale of fp16.
    """
    for router in engine.routers:
        router.begin_step(_loss_scale(engine) / engine.gradient_accumulation_steps())
    with loss_scale_limit_reported(), replaced(engine, hooks=hooks):
        return engine.train_batch(batches)


@torch.no_grad()
def eval_batch(engine: Engine, batches: Iterator[Batch] | None, hooks: Sequence[InstructionHook] = ()) -> Tensor:
    """The loss of a global batch, the same on every rank, without an optimizer step."""
    with replaced(engine, hooks=hooks):
        return engine.eval_batch(batches)


def step_status(engine: Engine) -> StepStatus:
    """The status of the step that ``engine`` has just run."""
    applied, norm = engine.was_step_applied(), engine.get_global_grad_norm()
    return StepStatus(
        applied=applied,
        grad_norm=norm if applied else None,
        loss_scale=_loss_scale(engine),
        skipped_iterations=engine.skipped_steps,
        loss_parts=engine.mean_loss_parts,
    )


def _loss_scale(engine: Engine) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


@contextmanager
def loss_scale_limit_reported() -> Iterator[None]:
    """Raise NumericsError, the same on all ranks, if gradients overflow at the smallest loss scale of fp16.

    DeepSpeed: runtime/fp16/loss_scaler.py, ``update_scale`` raises a bare Exception, known only from its text.
    Test: tests/training/test_loss_scale.py.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise NumericsError(
            "gradients overflow even at the smallest loss scale, --min-scale: lower --lr, or use --bf16"
        ) from error


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
"""Functions of torch.distributed that ``collectives_timed`` observes."""
_BACKEND_REFERENCES = {
    "all_gather_function": "all_gather_into_tensor",
    "reduce_scatter_function": "reduce_scatter_tensor",
}
"""Functions to which DeepSpeed's backend holds a reference, by the name of its attribute."""


@contextmanager
def collectives_timed(now: Callable[[], float], record: Callable[[str, float, float], None]) -> Iterator[None]:
    """While inside, call ``record(name, begin, end)`` for each collective called as ``torch.distributed.NAME``.

    torch 2.13: torch.distributed has no hook for collectives on every backend, so the functions are replaced, and
    DeepSpeed's references to them, in comm/torch.py, as well. Test: tests/tools/reporting/test_trace.py.
    """

    def timed(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = now()
            result = function(*arguments, **options)
            record(name, begin, now())
            return result

        return call

    backend = comm.comm.cdb
    references = {
        name: timed(function, getattr(backend, name))
        for name, function in _BACKEND_REFERENCES.items()
        if hasattr(backend, name)
    }
    collectives = {name: timed(name, getattr(dist, name)) for name in COLLECTIVES}
    with replaced(dist, **collectives), nullcontext() if backend is None else replaced(backend, **references):
        yield
