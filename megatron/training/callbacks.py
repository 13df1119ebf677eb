"""Callbacks that observe a run from outside the training loop. No torch.

The entry script registers callbacks; the core calls them, but does not import the tools that implement them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.common.errors import unwritable
from megatron.config import RunConfig
from megatron.parallel.pipeline.schedule import InstructionHook

OWN_METRICS = (
    *("consumed_samples", "consumed_tokens", "lm_loss", "learning_rate", "grad_norm", "loss_scale"),
    *("skipped_iterations", "seconds_per_iteration", "tokens_per_second", "tflops_per_device", "memory_gb"),
)
"""The names of the metrics of every run."""


@dataclass(frozen=True)
class MemoryPlan:
    """The planned memory of a rank that ran out of memory, and advice."""

    total: float
    """Bytes at the peak."""
    parts: Mapping[str, float]
    """Bytes at the peak by purpose, such as optimizer state."""
    advice: str
    """Which settings would fit."""


class Callback:
    """Base class of all callbacks. Its methods do nothing; a subclass overrides the methods that it needs."""

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Called when the configuration is final; ``device`` is the name of rank 0's device. Rank 0 only."""

    def around_iteration(self, iteration: int) -> AbstractContextManager[Sequence[InstructionHook]]:
        """Context in which an iteration runs; yields hooks for its pipeline instructions. Every rank."""
        return nullcontext(())

    def metrics(self) -> Mapping[str, Any]:
        """Additional metrics by name of a logged iteration, called after it has run. Every rank.

        Values are numbers, or tensors [], which are copied to the host together with the loss, so that the host waits
        for the GPU once.
        """
        return {}

    def on_metrics(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Called with the metrics by name of a logged iteration, or of an evaluation after it. Rank 0 only."""

    def on_out_of_memory(self, run: RunConfig, stage: int, available: float) -> MemoryPlan | None:
        """Called if a rank of pipeline stage ``stage`` needs more than its ``available`` bytes of memory.

        The first callback that returns a plan is reported.
        """
        return None

    def on_run_end(self) -> None:
        """Called when training has finished without an error. Every rank."""


@contextmanager
def warn_if_unwritable(what: str) -> Iterator[None]:
    """Turn an OSError inside into a warning: a run does not fail because a log file cannot be written."""
    try:
        yield
    except OSError as error:
        print(f"  warning: {unwritable(what, error)}; continuing without", flush=True)
