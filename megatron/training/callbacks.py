"""What looks closer at single iterations of a run, as its flags ask for it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from torch import nn, profiler

from megatron.config import RunConfig
from megatron.config.output import steps
from megatron.parallel.layout import ParallelLayout
from megatron.training.engines import Listener
from megatron.training.optional_files import unless_refused
from megatron.training.tracing import Tracer

_ROWS = 40


class Profiler:
    """The profile of one rank, with the instructions among what torch shows."""

    def __init__(self, run: RunConfig, rank: int) -> None:
        self._folder, self._rank = Path(str(run.observe.profile_dir)), rank
        self._left, self._seen = steps(str(run.observe.profile_steps)), 0
        self._profile: profiler.profile | None = None

    @contextmanager
    def iteration(self, number: int) -> Iterator[list[Listener]]:
        """Profile iteration ``number``, if it is one of those; the listeners that this takes."""
        self._seen += 1
        if self._seen not in self._left:
            yield []
            return
        if self._profile is None:
            self._profile = profiler.profile(record_shapes=True)
            self._profile.start()
        with profiler.record_function(f"iteration {number}"):
            yield [lambda instruction: profiler.record_function(str(instruction))]
        if self._seen == self._left[-1]:
            self.close()

    def close(self) -> None:
        """Write what was profiled, if that was not done yet."""
        if self._profile is None or not self._left:
            return
        self._left = range(0)
        self._profile.stop()
        averages = self._profile.key_averages()
        device = "device" if any(row.self_device_time_total for row in averages) else "cpu"
        table = averages.table(sort_by=f"self_{device}_time_total", row_limit=_ROWS)
        with unless_refused("the profile"):
            (self._folder / f"profile-rank{self._rank}.txt").write_text(table)
            self._profile.export_chrome_trace(str(self._folder / f"profile-rank{self._rank}.json"))


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
