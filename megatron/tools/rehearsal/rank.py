"""Runs the first iterations of one rank in this process, and measures steps, phases, operations and memory."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator

from megatron.config import RunConfig
from megatron.engines.engine import Engine
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.tools import pretraining
from megatron.tools.one_rank import patched
from megatron.tools.one_rank.group import OneRankGroup
from megatron.tools.one_rank.run import one_rank, run_program
from megatron.tools.rehearsal.counts import Counts, Operations
from megatron.tools.rehearsal.fake import FakeDevice, fake_device
from megatron.tools.rehearsal.memory import (
    before_measured_peak,
    held_by_kind,
    is_between_micro_batches,
    measured_peak,
    real_bytes,
)
from megatron.tools.rehearsal.rehearse import MEASURED, PHASED, WARM_UP, Rehearsal, shortened
from megatron.tools.reporting.callbacks import MemoryAdvice
from megatron.training import preflight, setup
from megatron.training.callbacks import Callback

PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "BackwardInputPass": "backward",
    "BackwardWeightPass": "backward",
    "ReduceGrads": "reduction",
    "ReduceTiedGrads": "reduction",
    "OptimizerStep": "optimizer",
}
"""DeepSpeed's names of pipeline instructions to names of phases; all other instructions belong to ``REST``."""
REST = "host"
"""Name of the rest of an iteration, outside of these phases."""


class Clocks(NamedTuple):
    """A time or duration in seconds, by wall clock and CPU clock."""

    wall: float
    cpu: float
    """CPU time of all threads of the process."""

    @classmethod
    def now(cls) -> "Clocks":
        """Read both clocks, after waiting for the device."""
        get_accelerator().synchronize()
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, earlier: "Clocks") -> "Clocks":
        return Clocks(self.wall - earlier.wall, self.cpu - earlier.cpu)

    def __add__(self, other: "Clocks") -> "Clocks":  # type: ignore[override]
        return Clocks(self.wall + other.wall, self.cpu + other.cpu)


ZERO = Clocks(0.0, 0.0)


class PhaseClocks:
    """Times the pipeline instructions of an iteration, each without the instructions nested in it."""

    def __init__(self, now: Callable[[], Clocks]) -> None:
        self._now = now
        self.passes: dict[tuple[str, int], list[Clocks]] = defaultdict(list)
        """Durations by (instruction name, model chunk of the stage)."""
        self._inside = ZERO
        self._begin = now()

    @contextmanager
    def hook(self, instruction: Instruction) -> Iterator[None]:
        """Time ``instruction``."""
        enclosing, self._inside = self._inside, ZERO
        begin = self._now()
        yield
        spent = self._now() - begin
        self.passes[instruction.name, instruction.phase or 0].append(spent - self._inside)
        self._inside = enclosing + spent

    def end(self) -> dict[str, Clocks]:
        """Seconds of each phase, at the end of the iteration."""
        phases: dict[str, Clocks] = defaultdict(lambda: ZERO)
        for (name, _), times in self.passes.items():
            for spent in times:
                phases[PHASES.get(name, REST)] += spent
        total = self._now() - self._begin
        phases[REST] += total - sum(phases.values(), start=ZERO)
        return dict(phases)


class Observer(Callback):
    """Callback that, after the warm-up, times iterations, then phases, measures memory, and counts operations.

    An iteration is timed from its start to the start of the next one, including the work of the training loop in
    between; the host waits for a GPU before the first and after the last timed iteration only.
    """

    def __init__(self, engine: Callable[[], Engine], steps: int, fake: FakeDevice | None = None):
        self._engine, self._steps, self._fake = engine, steps, fake
        self._marks: list[Clocks] = []
        self.host: list[float] = []
        """Seconds until the host has launched each timed iteration."""
        self.phase_clocks: list[PhaseClocks] = []
        self.phases: list[dict[str, Clocks]] = []
        """Seconds of each phase, for each iteration whose phases are timed."""
        self.operations = Operations()
        self.faking = ZERO
        """Seconds spent on faking data from other ranks, which do not count."""
        self._counts: Counts | None = None
        self.state_bytes: dict[str, int] = {}
        self.peak = 0

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Observe the iteration: warm up, time it, time its phases, measure memory, or count operations."""
        number = iteration - WARM_UP - 1
        if 0 <= number <= self._steps:
            self._marks.append(Clocks.now() - self.faking)
        phased = self._steps + (PHASED if self._steps else 0)
        observe = (
            nullcontext(()) if number < 0
            else self._timed() if number < self._steps
            else self._phased(is_last=number == phased - 1) if number < phased
            else self._measured() if number < phased + MEASURED
            else self._counted()
        )  # fmt: skip
        with observe as hooks:
            yield hooks

    @contextmanager
    def exclude_faking(self) -> Iterator[None]:
        """Context in which data from other ranks is faked; a real rank would not spend this time."""
        if self._counts is not None:
            with self._uncounted():
                yield
            return
        if get_accelerator().device_name() != "cpu":  # a real run launches kernels for its communication
            yield
            return
        begin = Clocks.now()
        yield
        self.faking += Clocks.now() - begin

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        assert self._counts is not None
        self._counts.is_paused = True
        yield
        self._counts.is_paused = False

    @property
    def seconds(self) -> list[Clocks]:
        """Duration of each timed iteration."""
        return [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]

    @contextmanager
    def _timed(self) -> Iterator[Sequence[InstructionHook]]:
        begin = time.perf_counter()
        yield ()
        self.host.append(time.perf_counter() - begin)

    @contextmanager
    def _phased(self, *, is_last: bool) -> Iterator[Sequence[InstructionHook]]:
        clocks = PhaseClocks(lambda: Clocks.now() - self.faking)
        with before_measured_peak() if is_last else nullcontext():
            yield [clocks.hook]
        self.phases.append(clocks.end())
        self.phase_clocks.append(clocks)

    @contextmanager
    def _counted(self) -> Iterator[Sequence[InstructionHook]]:
        """Count operations, and measure weights, gradients and optimizer state when gradients are accumulated."""

        @contextmanager
        def measure_state(instruction: Instruction) -> Iterator[None]:
            if not self.state_bytes and is_between_micro_batches(self._engine(), instruction):
                with self._uncounted():
                    self.state_bytes = held_by_kind(self._engine())
            yield

        with Counts(self.operations) as self._counts:
            yield [self._counts.hook, measure_state]
        self._counts = None

    @contextmanager
    def _measured(self) -> Iterator[Sequence[InstructionHook]]:
        if self._fake is not None:
            self._fake.highest = self._fake.level
            yield ()
            self.peak = self._fake.highest + real_bytes()
            return
        with measured_peak() as peak:
            yield ()
        self.peak = peak[0]


def rehearse(rehearsal: Rehearsal, number: int, program: Path) -> dict[str, Any]:
    """Run the first iterations of ``program`` as rank ``number``. Returns seconds, counts and bytes."""
    engines: list[Engine] = []
    with ExitStack() as stack:
        stack.enter_context(one_rank(rehearsal.world_size, number, rehearsal.per_node))
        fake = stack.enter_context(fake_device()) if rehearsal.fake else None
        observer = Observer(lambda: engines[0], rehearsal.timed, fake)
        stack.enter_context(observing(observer, engines, rehearsal.iterations))
        code = run_program(program, rehearsal.arguments)
    return as_dict(observer) | {"rank": number, "exit_code": code}


@contextmanager
def observing(observer: Observer, engines: list[Engine], iterations: int) -> Iterator[None]:
    """Context in which a program trains for ``iterations`` iterations with ``observer`` as a callback."""
    check, start, do = preflight.check, setup.start_engine, OneRankGroup.do

    def checked(run: RunConfig) -> tuple[RunConfig, None]:
        run, _ = check(run)
        return shortened(run, iterations), None

    def record_engine(*arguments: Any, **options: Any) -> Any:
        started = start(*arguments, **options)
        engines.append(started[0])
        return started

    def do_without_time(group: OneRankGroup, deliver: Any, kind: str, *arguments: Any) -> Any:
        def deliver_without_time() -> None:
            with observer.exclude_faking():
                deliver()

        return do(group, deliver_without_time, kind, *arguments)

    with patched(
        (preflight, "check", checked),
        (setup, "start_engine", record_engine),
        (pretraining, "default_callbacks", lambda: [observer, MemoryAdvice()]),
        (OneRankGroup, "do", do_without_time),
        (OneRankGroup, "observer", observer.operations),
    ):
        yield


def as_dict(observer: Observer) -> dict[str, Any]:
    """The measurements of ``observer`` for a JSON file."""
    operations, state = observer.operations, observer.state_bytes
    measurements: dict[str, Any] = {
        "memory_bytes": {**state, "activations": observer.peak - sum(state.values()), "peak": observer.peak},
        "kernels": operations.kernels.total(),
        "copies": operations.copies.total(),
        "copied_bytes": operations.copied_bytes,
        "collectives": operations.communication.total(),
        "sent_bytes": operations.sent_bytes,
        "host_waits": operations.waits.total(),
        "by_instruction": {name: dict(getattr(operations, name)) for name in ("kernels", "copies", "waits")},
        "communication": [
            {**communication._asdict(), "times": count} for communication, count in operations.communication.items()
        ],
    }
    return measurements | (_times(observer) if observer.seconds else {})


def _times(observer: Observer) -> dict[str, Any]:
    """Median seconds of iterations, phases and passes."""
    phases, clocks = observer.phases, observer.phase_clocks
    return {
        "seconds": _median(observer.seconds),
        "rounds": [seconds._asdict() for seconds in observer.seconds],
        "launched_seconds": statistics.median(observer.host),
        "phases": {name: _median([iteration.get(name, ZERO) for iteration in phases]) for name in phases[0]},
        "passes": [
            {"instruction": name, "chunk": chunk}
            | _median([spent for iteration in clocks for spent in iteration.passes[name, chunk]])
            for name, chunk in clocks[0].passes
        ],
    }


def _median(times: Sequence[Clocks]) -> dict[str, float]:
    """Medians of wall and CPU seconds."""
    return {name: statistics.median(getattr(seconds, name) for seconds in times) for name in Clocks._fields}
