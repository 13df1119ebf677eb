"""Train on one layout after the other, compare each with the first, and report the differences.

On a CPU the ranks are forks of one process that has imported torch and DeepSpeed, and start within a second. On a GPU
each rank is a new process, since CUDA does not survive a fork. No torch in this process.
"""

import dataclasses
import json
import math
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from megatron.common.environment import threads_per_rank
from megatron.common.errors import CheckpointError
from megatron.common.files import file_mode
from megatron.common.processes import die_with_parent
from megatron.config import RunConfig
from megatron.launch.environment import divide_cores, free_port, prepare_environment
from megatron.tools.verify.compare import Bounds, Differences, Result, compare, first_step, read_result
from megatron.tools.verify.request import Layout, Request

_SAVED_ITERATIONS = 5
"""Up to that many, a checkpoint after each iteration takes less time than to start a second run."""


@dataclass(frozen=True)
class LayoutResult:
    """Whether a layout computes what the first one computes."""

    layout: Layout
    seconds: float
    differences: Differences | None
    """From the first layout; None if the run failed."""
    agrees: bool
    failure: str | None = None

    @property
    def summary(self) -> str:
        """agrees, failed, or the first quantity that differs."""
        if self.differences is None:
            return "failed"
        if self.agrees:
            return "agrees"
        return f"differs, first in {self.differences.first}" if self.differences.first else "differs"


def verify_layouts(
    request: Request, layouts: Sequence[Layout], bounds: Bounds, time_limit: float
) -> Iterator[LayoutResult]:
    """The result of each layout as soon as it is there. If the first fails there is nothing to compare with."""
    trainer = Trainer(request, request.run(layouts[0]), time_limit)
    reference: Result | None = None
    for layout in layouts:
        start = time.monotonic()
        result, failure = trainer.train(layout)
        differences = None
        if result is not None:
            reference = reference or result
            differences = compare(reference, result, bounds)
        agrees = differences is not None and differences.agree(bounds)
        yield LayoutResult(layout, time.monotonic() - start, differences, agrees, failure)
        if reference is None:
            return


class Trainer:
    """Trains on layouts and reads what they computed."""

    def __init__(self, request: Request, run: RunConfig, time_limit: float) -> None:
        self._request, self._optim, self._time_limit = request, run.optim, time_limit
        prepare_environment(os.environ)  # of the process that the ranks are forks of
        self._context = rank_context(run.parallel.device)

    def train(
        self, layout: Layout, iterations: int | None = None, recorded: Path | None = None
    ) -> tuple[Result | None, str | None]:
        """What ``layout`` computes in that many iterations, or why its run failed.

        The gradients of the first step are in the checkpoint after it. A run of few iterations saves after each; a
        longer one saves at its end, and a second run ends with the first step. The last iteration is ``recorded``.
        """
        iterations = iterations or self._request.iterations
        with tempfile.TemporaryDirectory(prefix="verify_layout.", ignore_cleanup_errors=True) as root:
            run = short = Path(root) / "run"
            saves_all = iterations <= _SAVED_ITERATIONS
            try:
                if failure := self._run(layout, run, iterations, 1 if saves_all else None, recorded):
                    return None, failure
                step = first_step(run)
                if not saves_all and step + 1 < iterations:
                    short = Path(root) / "first"
                    if failure := self._run(layout, short, step + 1):
                        return None, failure
                return read_result(run, short, self._optim), None
            except CheckpointError as error:
                return None, str(error)

    def _run(
        self,
        layout: Layout,
        folder: Path,
        iterations: int,
        save_interval: int | None = None,
        recorded: Path | None = None,
    ) -> str | None:
        folder.mkdir()
        command = self._request.command(layout, folder, iterations, save_interval or iterations)
        log, recording = folder / "log.txt", (str(recorded), iterations) if recorded else None
        environ = self._request.environ
        return run_ranks(self._context, layout.processes, command, environ, log, self._time_limit, recording)


def progress_line(number: int, total: int, result: LayoutResult) -> str:
    """A line for a layout that is done."""
    line = f"[{number:{len(str(total))}}/{total}] {result.layout.name}: {result.summary} ({result.seconds:.0f} s)"
    return line if result.failure is None else f"{line}, {result.failure}"


_COLUMNS = ("loss", "grad_norm", "gradient", "weights", "other_weights")


def table(results: Sequence[LayoutResult], bounds: Bounds) -> str:
    """The largest differences of each layout, and their bounds."""
    rows = [("layout", "processes", *(name.replace("_", " ") for name in _COLUMNS), "result")]
    for result in results:
        found = [getattr(result.differences, name, None) for name in _COLUMNS]
        numbers = ["-" if number is None else f"{number:.1e}" for number in found]
        rows.append((result.layout.name, str(result.layout.processes), *numbers, result.summary))
    rows.append(("bound", "", *(f"{bound:.1e}" for bound in bounds), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, summary in rows:
        aligned = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:{widths[0]}}", *aligned, summary]).rstrip())
    return "\n".join(lines)


def as_json(results: Sequence[LayoutResult], bisections: Sequence[object], *, bounds: Bounds, iterations: int) -> str:
    """The same for programs. A difference that is infinite or NaN is null."""
    layouts = [
        {
            "layout": result.layout.name,
            "processes": result.layout.processes,
            "agrees": result.agrees,
            "seconds": round(result.seconds, 1),
            "failure": result.failure,
            **_finite(dataclasses.asdict(result.differences) if result.differences else {}),
        }
        for result in results
    ]
    written = {"tolerances": bounds._asdict(), "iterations": iterations, "layouts": layouts}
    return json.dumps(written | {"bisections": [str(one) for one in bisections]}, indent=2)


def _finite(values: dict) -> dict:
    return {key: None if value == math.inf else value for key, value in values.items()}


_PRELOADED = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by the first use of ZeRO
    "torch._dynamo",  # imported by the first optimizer
    "megatron.checkpoint.load",
    "megatron.training.data_iterators",
    "megatron.training.setup",
    "megatron.tools.reporting.tracing",
    "megatron.training.trainer",
    "megatron.tools.verify.recording",
]
_FAILURE_SECONDS = 10.0
"""Time for the other ranks to exit after one has failed."""


def rank_context(device: str) -> ForkServerContext | SpawnContext:
    """How the ranks of runs on ``device`` are started. On a CPU it begins with the imports that they share."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    python_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server searches no other path for what it preloads
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
    return context


def run_ranks(
    context: ForkServerContext | SpawnContext,
    processes: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    time_limit: float,
    recording: tuple[str, int] | None = None,
) -> str | None:
    """Run ``python COMMAND`` as ``processes`` ranks on this host, with their output in ``log``.

    ``recording`` is a folder, and the iteration that is recorded there.

    Returns None if all ranks succeed within ``time_limit`` seconds, else what went wrong and the last lines of the log.
    """
    ranks = [
        context.Process(target=_run_program, args=(list(command), of_rank, str(log), recording))
        for of_rank in _environments(processes, environ)
    ]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + time_limit
        running, failure = list(ranks), None
        while running and (ended := wait([rank.sentinel for rank in running], max(deadline - time.monotonic(), 0))):
            for rank in [rank for rank in running if rank.sentinel in ended]:
                rank.join()
                running.remove(rank)
                if rank.exitcode and failure is None:
                    failure = f"exit code {rank.exitcode}"
                    deadline = min(deadline, time.monotonic() + _FAILURE_SECONDS)
        if running and failure is None:
            failure = f"not finished after {time_limit:g} s"
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
    return failure and f"{failure}:\n{_last_lines(log)}"


def _environments(processes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank, as launchers set it."""
    shared = {**environ, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    divide_cores(shared, processes)
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run_program(command: list[str], environ: dict[str, str], log: str, recording: tuple[str, int] | None) -> None:
    """Become the program, on one rank."""
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, file_mode())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    if torch := sys.modules.get("torch"):  # a fork: OpenMP has read its environment already
        torch.set_num_threads(threads_per_rank(environ) or 1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    try:
        if recording is not None:
            prepare_environment(os.environ)  # before torch is imported
            from megatron.tools.verify.recording import record_run

            record_run(*recording)
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def _last_lines(log: Path, lines: int = 15) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
