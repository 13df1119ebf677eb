"""Run the first iterations of one rank in this process, and describe what they took."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.config import RunConfig
from megatron.engines.engine import Engine
from megatron.tools import pretraining
from megatron.tools.one_rank.group import OneRankGroup
from megatron.tools.one_rank.run import one_rank, run_program
from megatron.tools.rehearsal.fake import fake_device
from megatron.tools.rehearsal.observer import Clocks, Observer
from megatron.tools.rehearsal.request import Rehearsal, shortened
from megatron.tools.reporting import callbacks
from megatron.training import preflight, setup


def rehearse(rehearsal: Rehearsal, number: int, program: Path) -> dict[str, Any]:
    """Seconds, counts and bytes of rank ``number``, from the first iterations of ``program``."""
    engines: list[Engine] = []
    with ExitStack() as stack:
        stack.enter_context(one_rank(rehearsal.world_size, number))
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

    with ExitStack() as stack:
        for owner, name, value in (
            (preflight, "check", checked),
            (setup, "start_engine", started),
            (pretraining, "default_callbacks", lambda: [observer, callbacks.MemoryAdvice()]),
            (OneRankGroup, "do", done),
            (OneRankGroup, "observer", observer.operations),
        ):
            stack.enter_context(patch.object(owner, name, value))
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
            name: _median([one.get(name, Clocks(0.0, 0.0)) for one in observer.of_phases])
            for name in observer.of_phases[0]
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
