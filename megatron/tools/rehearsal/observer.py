"""What a rehearsed rank does in its iterations: times of steps and phases, operations, and memory."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from deepspeed.accelerator import get_accelerator

from megatron.engines.engine import Engine
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.tools.rehearsal.counts import Counts, Operations
from megatron.tools.rehearsal.fake import FakeDevice
from megatron.tools.rehearsal.memory import (
    before_measured_peak,
    held_by_kind,
    is_between_micro_batches,
    measured_peak,
    real_bytes,
)
from megatron.tools.rehearsal.request import MEASURED, PHASED, WARM_UP
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
"""Names of phases, by DeepSpeed's names of instructions; all else is of the host."""
REST = "host"
"""What an iteration does outside of these phases."""


class Clocks(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float
    """Of all threads of the process."""

    @classmethod
    def now(cls) -> "Clocks":
        """Read both, after the device has finished its work."""
        get_accelerator().synchronize()
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, earlier: "Clocks") -> "Clocks":
        return Clocks(self.wall - earlier.wall, self.cpu - earlier.cpu)

    def __add__(self, other: "Clocks") -> "Clocks":  # type: ignore[override]
        return Clocks(self.wall + other.wall, self.cpu + other.cpu)


ZERO = Clocks(0.0, 0.0)


class PhaseClocks:
    """Seconds in each instruction of an iteration; one inside another counts only itself."""

    def __init__(self, now: Callable[[], Clocks]) -> None:
        self._now = now
        self.passes: dict[tuple[str, int], list[Clocks]] = defaultdict(list)
        """By the name of the instruction and the model chunk of the stage."""
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
        """Seconds of each phase, once the iteration has ended."""
        of_phases: dict[str, Clocks] = defaultdict(lambda: ZERO)
        for (name, _), times in self.passes.items():
            for spent in times:
                of_phases[PHASES.get(name, REST)] += spent
        total = self._now() - self._begin
        of_phases[REST] += total - sum(of_phases.values(), start=ZERO)
        return dict(of_phases)


class Observer(Callback):
    """Times the iterations after the warm-up, then phases, then measures memory, then counts operations.

    Iterations are timed from the beginning of one to the beginning of the next, with all that the training loop does
    between; on a GPU the host does not wait in these, but before the first and after the last.
    """

    def __init__(self, engine: Callable[[], Engine], steps: int, fake: FakeDevice | None = None):
        self._engine, self._steps, self._fake = engine, steps, fake
        self._marks: list[Clocks] = []
        self.host: list[float] = []
        """Seconds until the host has launched all of a timed iteration."""
        self.phases: list[PhaseClocks] = []
        self.of_phases: list[dict[str, Clocks]] = []
        self.operations = Operations()
        self.delivered = ZERO
        """Seconds in which data that other ranks would send was made up."""
        self._counts: Counts | None = None
        self.held: dict[str, int] = {}
        self.peak = 0

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Whichever of these this iteration is for."""
        number = iteration - WARM_UP - 1
        if 0 <= number <= self._steps:
            self._marks.append(Clocks.now() - self.delivered)
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
    def delivering(self) -> Iterator[None]:
        """While inside, data is made up that another rank would send: this rank would do nothing."""
        if self._counts is not None:
            with self._uncounted():
                yield
            return
        if get_accelerator().device_name() != "cpu":  # kernels, which a run would use for its communication
            yield
            return
        begin = Clocks.now()
        yield
        self.delivered += Clocks.now() - begin

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        assert self._counts is not None
        self._counts.is_paused = True
        yield
        self._counts.is_paused = False

    @property
    def seconds(self) -> list[Clocks]:
        """Of each timed iteration."""
        return [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]

    @contextmanager
    def _timed(self) -> Iterator[Sequence[InstructionHook]]:
        begin = time.perf_counter()
        yield ()
        self.host.append(time.perf_counter() - begin)

    @contextmanager
    def _phased(self, *, is_last: bool) -> Iterator[Sequence[InstructionHook]]:
        clocks = PhaseClocks(lambda: Clocks.now() - self.delivered)
        with before_measured_peak() if is_last else nullcontext():
            yield [clocks.hook]
        self.of_phases.append(clocks.end())
        self.phases.append(clocks)

    @contextmanager
    def _counted(self) -> Iterator[Sequence[InstructionHook]]:
        """Count operations, and look at memory when gradients have been summed up."""

        @contextmanager
        def look(instruction: Instruction) -> Iterator[None]:
            if not self.held and is_between_micro_batches(self._engine(), instruction):
                with self._uncounted():
                    self.held = held_by_kind(self._engine())
            yield

        with Counts(self.operations) as self._counts:
            yield [self._counts.hook, look]
        self._counts = None

    @contextmanager
    def _measured(self) -> Iterator[Sequence[InstructionHook]]:
        if self._fake is not None:
            self._fake.highest = self._fake.level
            yield ()
            self.peak = self._fake.highest + real_bytes()
            return
        with measured_peak() as found:
            yield ()
        self.peak = found[0]
