"""Rehearse ranks, each in a process of its own, which imports torch; and layouts of a plan, ranked by their steps."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.common.environment import expected_device
from megatron.common.errors import LaunchError, ResourceError, UserError
from megatron.common.units import duration, with_prefix
from megatron.config import RunConfig
from megatron.tools.planning.output import aligned, layout_of
from megatron.tools.planning.search import Candidate
from megatron.tools.rehearsal.estimate import Expected
from megatron.tools.rehearsal.request import Rehearsal, representative_ranks

_SHOWN = 40
"""Last lines of a program that fails without an error of the user."""


def checked_run(rehearsal: Rehearsal) -> RunConfig:
    """The run, with its data and vocabulary. Raises UserError."""
    environ = {**os.environ, **rehearsal.environ(0), "DS_ACCELERATOR": expected_device(os.environ)}
    run = rehearsal.run(environ)
    from megatron.training.preflight import check

    if rehearsal.fake:  # memory of this host does not matter
        run = replace(run, logging=replace(run.logging, dry_run=True))
    run, _ = check(run)
    return replace(run, logging=replace(run.logging, dry_run=False))


def rehearse_ranks(rehearsal: Rehearsal, ranks: Sequence[int], program: Path) -> Iterator[dict[str, Any]]:
    """The figures of each of ``ranks``. Raises UserError if one fails."""
    sys.stdout.flush()
    for number in ranks:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as result:
            child = os.fork()
            if child == 0:
                _run(rehearsal, number, program, output.fileno(), result.fileno())
            try:
                _, status = os.waitpid(child, 0)
            except BaseException:
                os.kill(child, 9)  # it would end after its iteration
                os.waitpid(child, 0)
                raise
            yield _result(number, os.waitstatus_to_exitcode(status), output, result)


def _run(rehearsal: Rehearsal, number: int, program: Path, output: int, result: int) -> NoReturn:
    """In a process of its own: rehearse, and write the figures as JSON."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(rehearsal.environ(number))
        from megatron.launch.environment import prepare_environment

        prepare_environment(os.environ)  # before torch is imported
        from megatron.tools.rehearsal.rank import rehearse

        found = rehearse(rehearsal, number, program)
        code = found.pop("exit_code")
        Path(f"/dev/fd/{result}").write_text(json.dumps(found))
    except UserError as error:
        print("\n".join(error.messages), file=sys.stderr)
        code = error.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _result(number: int, code: int, output: Any, result: Any) -> dict[str, Any]:
    """The figures of rank ``number``, whose process has ended."""
    result.seek(0)
    text = result.read()
    if code == 0 and text:
        return json.loads(text)
    output.seek(0)
    lines = [line for line in output.read().splitlines() if line.strip()]
    if code < 0:
        raise ResourceError(
            f"the rehearsal of rank {number} was ended by signal {-code}, perhaps for want of memory: rehearse a "
            "layout that takes less (tools/plan.py), or describe this one with --fake"
        )
    kinds = {kind.exit_code: kind for kind in UserError.__subclasses__()}
    errors = [line for line in lines if "error: " in line] or [*lines[-_SHOWN:], f"ended with exit code {code}"]
    raise kinds.get(code, LaunchError)([f"rank {number}: {line.partition('error: ')[2] or line}" for line in errors])


class Rehearsed(NamedTuple):
    """A layout and what its ranks took."""

    number: int
    """Its row in the plan, from 1 on."""
    candidate: Candidate
    expected: Expected | None
    """None if this machine has too little memory for a rank."""

    @property
    def peak(self) -> int:
        """Bytes of the rank that takes most."""
        ranks = self.expected.ranks if self.expected else ()
        return max((rank["memory_bytes"]["peak"] for rank in ranks), default=0)


def rehearse_layouts(candidates: Sequence[Candidate], program: Path, steps: int) -> Iterator[Rehearsed]:
    """Rehearse a rank of each kind of stage of each layout. Raises UserError if the program cannot be started."""
    for number, one in enumerate(candidates, 1):
        request = one.request
        rehearsal = Rehearsal(
            one.command, request.architecture, request.devices, request.machine.per_node, steps, fake=False
        )
        run = checked_run(rehearsal)
        try:
            ranks = list(rehearse_ranks(rehearsal, representative_ranks(run), program))
        except ResourceError:
            yield Rehearsed(number, one, None)
        else:
            yield Rehearsed(number, one, Expected(run, request.machine, ranks))


def ranked(layouts: Sequence[Rehearsed]) -> list[str]:
    """A table of ``layouts``, the fastest first."""
    fastest = sorted(layouts, key=lambda one: one.expected.seconds if one.expected else float("inf"))
    return aligned([("row", "TP", "PP", "DP", "ZeRO", "micro", "planned step", "expected step", "between",
                     "planned memory", "peak memory"), *map(_row, fastest)])  # fmt: skip


def _row(one: Rehearsed) -> tuple[str, ...]:
    layout, planned = layout_of(one.candidate), one.candidate
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "zero_stage", "micro_batch_size")
    sizes = [str(one.number), *(str(layout[name]) for name in names), duration(planned.timing.total)]
    memory = with_prefix(planned.memory.total, "B")
    if one.expected is None:
        return (*sizes, "out of memory here", "", memory, "")
    low, high = one.expected.between
    between = f"{duration(low)} to {duration(high)}"
    room = "" if one.peak <= planned.request.room else " (too much)"
    return (*sizes, duration(one.expected.seconds), between, memory, with_prefix(one.peak, "B") + room)
