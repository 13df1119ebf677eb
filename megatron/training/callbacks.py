"""Callbacks: what observes a run without being part of the training loop. No torch.

The entry script registers those that it wants; the core calls them, and imports none of what they are built from.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.config import RunConfig
from megatron.parallel.pipeline.schedule import InstructionHook


@dataclass(frozen=True)
class MemoryPlan:
    """What a rank that ran out of memory was planned to hold, and what would fit."""

    total: float
    """Bytes at the peak."""
    parts: Mapping[str, float]
    """The same by what they are for."""
    advice: str


class Callback:
    """Base class of all callbacks. Its hooks do nothing; a subclass overrides those that it needs."""

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """The configuration is final, and ``device`` is the name of what rank 0 computes on. Rank 0 only."""

    def around_iteration(self, iteration: int) -> AbstractContextManager[Sequence[InstructionHook]]:
        """Context in which an iteration runs; it yields hooks for the instructions of this iteration. Every rank."""
        return nullcontext(())

    def metrics(self) -> Mapping[str, Any]:
        """Further values for the metrics of a logged iteration, after it has run. Every rank.

        They are numbers, or tensors [], which are copied to the host together with the loss: a GPU is waited for once.
        """
        return {}

    def on_metrics(self, iteration: int, values: Mapping[str, Any]) -> None:
        """The metrics of a logged iteration, or of an evaluation after it, by name. Rank 0 only."""

    def on_out_of_memory(self, run: RunConfig, stage: int, available: float) -> MemoryPlan | None:
        """A rank of pipeline stage ``stage`` needs more than its ``available`` bytes. The first plan is reported."""
        return None

    def on_run_end(self) -> None:
        """Training has finished without an error. Every rank."""


@contextmanager
def warn_if_unwritable(what: str) -> Iterator[None]:
    """Replace an OSError inside by a warning: files about a run are not worth the run."""
    try:
        yield
    except OSError as error:
        print(f"  warning: {what} cannot be written ({error.strerror}); continuing without", flush=True)
