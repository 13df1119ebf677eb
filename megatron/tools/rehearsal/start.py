"""Rehearse ranks one after the other, each in a process of its own. No torch here: the processes import it."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron.common.environment import expected_device
from megatron.common.errors import LaunchError, ResourceError, UserError
from megatron.config import RunConfig
from megatron.tools.rehearsal.request import Rehearsal

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
    errors = [line for line in lines if "error: " in line] or lines[-_SHOWN:] or [f"ended with exit code {code}"]
    raise kinds.get(code, LaunchError)([f"rank {number}: {line.partition('error: ')[2] or line}" for line in errors])
