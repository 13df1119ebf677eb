"""Run layout after layout, each beside the first."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from megatron.config import ParallelConfig
from megatron.config.errors import CheckpointError
from megatron.launch.distributed import distributed
from megatron.launch.environment import prepare_environment
from megatron.parallel.layout import ParallelLayout
from megatron.tools.verify.comparing import Differences, Result, Tolerances, compare, read_result
from megatron.tools.verify.request import Layout, Request

PROGRAM = Path(__file__).resolve().parents[3] / "pretrain_gpt2.py"


class Finished(NamedTuple):
    """How a run ended."""

    seconds: float
    failure: str | None
    """Its last words, if it failed."""


def train(request: Request, layout: Layout, folder: Path, time_limit: float) -> Finished:
    """Train on ``layout`` and wait for it; metrics and checkpoint are in ``folder`` then."""
    command = [sys.executable, str(PROGRAM), *request.command(layout, folder)]
    if layout.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(layout.processes)]
        command[1:1] = launcher
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, env=dict(request.environ), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        failure = None
        try:
            if code := process.wait(time_limit):
                failure = f"exit code {code}:\n{_last_words(output)}"
        except subprocess.TimeoutExpired:
            failure = f"no end after {time_limit:g} s:\n{_last_words(output)}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Finished(time.monotonic() - start, failure)


def _last_words(output: TextIO, lines: int = 15) -> str:
    output.seek(0)
    return "\n".join(f"    {line}" for line in output.read().splitlines()[-lines:])


@dataclass(frozen=True)
class Verdict:
    """A layout, and what came of it."""

    layout: Layout
    seconds: float
    differences: Differences | None
    """From the first layout; None where the run failed."""
    agrees: bool
    failure: str | None = None

    @property
    def words(self) -> str:
        """In a word, or where it goes wrong."""
        if self.differences is None:
            return "failed"
        if self.agrees:
            return "agrees"
        return f"differs, first in {self.differences.first_tensor}" if self.differences.first_tensor else "differs"


def progress(number: int, total: int, verdict: Verdict) -> str:
    """A line for a layout that is done."""
    line = f"[{number:{len(str(total))}}/{total}] {verdict.layout.name}: {verdict.words} ({verdict.seconds:.0f} s)"
    return line if verdict.failure is None else f"{line}, {verdict.failure}"


def table(verdicts: Sequence[Verdict]) -> str:
    """All layouts below each other."""
    rows = [("layout", "processes", "loss", "grad norm", "weights", "")]
    for verdict in verdicts:
        found = verdict.differences
        numbers = (found.loss, found.grad_norm, found.weights) if found else ()
        columns = [f"{number:.1e}" for number in numbers] or ["-"] * 3
        rows.append((verdict.layout.name, str(verdict.layout.processes), *columns, verdict.words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, words in rows:
        aligned = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:{widths[0]}}", *aligned, words]).rstrip())
    return "\n".join(lines)


def as_json(verdicts: Sequence[Verdict], *, tolerances: Tolerances, iterations: int) -> str:
    """All that is known, for programs. A difference that is infinite, or not a number, is null."""
    layouts = []
    for verdict in verdicts:
        found = dataclasses.asdict(verdict.differences) if verdict.differences else {}
        layouts.append(
            {
                "layout": verdict.layout.name,
                "processes": verdict.layout.processes,
                "agrees": verdict.agrees,
                "seconds": round(verdict.seconds, 1),
                "failure": verdict.failure,
                **{key: None if value == math.inf else value for key, value in found.items()},
            }
        )
    bounds = {name: None if bound == math.inf else bound for name, bound in tolerances._asdict().items()}
    return json.dumps({"tolerances": bounds, "iterations": iterations, "layouts": layouts}, indent=2)


def verdicts(
    request: Request, layouts: Sequence[Layout], tolerances: Tolerances, time_limit: float
) -> Iterator[Verdict]:
    """What comes of each layout, as soon as it is known. Where the first fails there is nothing to compare with."""
    prepare_environment(os.environ)  # the runs take theirs from the request
    reference: Result | None = None
    with distributed(ParallelConfig()) as whole, tempfile.TemporaryDirectory(prefix="verify_layout.") as root:
        for layout in layouts:
            folder = Path(root) / layout.name
            seconds, failure = train(request, layout, folder, time_limit)
            result = None
            if failure is None:
                result, failure = _result(folder, whole)
            if reference is None:
                reference = result
            yield _verdict(layout, seconds, reference, result, failure, tolerances)
            if reference is None:
                return
            shutil.rmtree(folder, ignore_errors=True)


def _result(folder: Path, whole: ParallelLayout) -> tuple[Result | None, str | None]:
    try:
        return read_result(folder, whole), None
    except CheckpointError as error:
        return None, str(error)


def _verdict(
    layout: Layout,
    seconds: float,
    reference: Result | None,
    result: Result | None,
    failure: str | None,
    tolerances: Tolerances,
) -> Verdict:
    if reference is None or result is None:
        return Verdict(layout, seconds, None, agrees=False, failure=failure)
    differences = compare(reference, result, tolerances)
    return Verdict(layout, seconds, differences, differences.agree(tolerances))
