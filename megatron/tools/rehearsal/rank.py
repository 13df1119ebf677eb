"""Run the first iterations of one rank in this process: times of steps and phases, operations, and memory."""

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


def rehearse(rehearsal: Rehearsal, number: int, program: Path) -> dict[str, Any]:
    """Seconds, counts and bytes of rank ``number``, from the first iterations of ``program``."""
    engines: list[Engine] = []
    with ExitStack() as stack:
        stack.enter_context(one_rank(rehearsal.world_size, number, rehearsal.per_node))
        fake = stack.enter_context(fake_device()) if rehearsal.fake else None
        observer = Observer(lambda: engines[0], rehearsal.timed, fake)
        stack.enter_context(observed(observer, engines, rehearsal.iterations))
        code = run_program(program, rehearsal.words)
    return described(observer) | {"rank": number, "exit_code": code}


@contextmanager
def observed(observer: Observer, engines: list[Engine], iterations: int) -> Iterator[None]:
    """While inside, a program trains for so many iterations with ``observer`` as its callback."""
    check, start, do = preflight.check, setup.start_engine, OneRankGroup.do

    def checked(run: RunConfig) -> tuple[RunConfig, None]:
        run, _ = check(run)
        return shortened(run, iterations), None

    def started(*arguments: Any, **options: Any) -> Any:
        found = start(*arguments, **options)
        engines.append(found[0])
        return found

    def done(group: OneRankGroup, deliver: Any, kind: str, *arguments: Any) -> Any:
        def delivered() -> None:
            with observer.delivering():
                deliver()

        return do(group, delivered, kind, *arguments)

    with patched(
        (preflight, "check", checked),
        (setup, "start_engine", started),
        (pretraining, "default_callbacks", lambda: [observer, MemoryAdvice()]),
        (OneRankGroup, "do", done),
        (OneRankGroup, "observer", observer.operations),
    ):
        yield


def described(observer: Observer) -> dict[str, Any]:
    """The figures of an observed rank, for a JSON file."""
    operations, held = observer.operations, observer.held
    found: dict[str, Any] = {
        "memory_bytes": {**held, "activations": observer.peak - sum(held.values()), "peak": observer.peak},
        "kernels": operations.kernels.total(),
        "copies": operations.copies.total(),
        "copied_bytes": operations.copied_bytes,
        "collectives": operations.communication.total(),
        "sent_bytes": operations.sent_bytes,
        "host_waits": operations.waits.total(),
        "by_instruction": {name: dict(getattr(operations, name)) for name in ("kernels", "copies", "waits")},
        "communication": [{**one._asdict(), "times": count} for one, count in operations.communication.items()],
    }
    return found | (_times(observer) if observer.seconds else {})


def _times(observer: Observer) -> dict[str, Any]:
    """The same of seconds: medians of iterations, phases and passes."""
    return {
        "seconds": _median(observer.seconds),
        "rounds": [one._asdict() for one in observer.seconds],
        "launched_seconds": statistics.median(observer.host),
        "phases": {
            name: _median([one.get(name, ZERO) for one in observer.of_phases]) for name in observer.of_phases[0]
        },
        "passes": [
            {"instruction": name, "chunk": chunk}
            | _median([spent for one in observer.phases for spent in one.passes[name, chunk]])
            for name, chunk in observer.phases[0].passes
        ],
    }


def _median(times: Sequence[Clocks]) -> dict[str, float]:
    """Medians of wall and CPU seconds."""
    return {name: statistics.median(getattr(one, name) for one in times) for name in Clocks._fields}
