"""What looks closer at single iterations of a run, as its flags ask for it."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import nn

from megatron.config import RunConfig
from megatron.engine import Listener
from megatron.mpu.layout import ParallelLayout
from megatron.observe.files import unless_refused
from megatron.observe.profiling import Profiler
from megatron.observe.trace.recorder import Tracer


class Instrument(Protocol):
    """Something that looks at iterations from within."""

    def iteration(self, number: int) -> AbstractContextManager[list[Listener]]:
        """Goes around an iteration; what it returns hears its instructions."""

    def close(self) -> None:
        """Write what is left to write."""


def instruments(run: RunConfig, layout: ParallelLayout, module: nn.Module) -> list[Instrument]:
    """Those that ``run`` asks for; none costs nothing."""
    found: list[Instrument] = []
    if run.observe.profiles:
        with unless_refused("profiles"):
            Path(str(run.observe.profile_dir)).mkdir(parents=True, exist_ok=True)
    if run.observe.profile_steps is not None:
        found.append(Profiler(run, layout.rank))
    if run.observe.trace is not None:
        found.append(Tracer(run, layout, module))
    return found
