"""Train on one layout after the other, compare each with the first, and report the differences."""

import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import CheckpointError
from megatron.config import RunConfig
from megatron.launch.environment import prepare_environment
from megatron.tools.verify.compare import Bounds, Differences, Result, compare, first_step, read_result
from megatron.tools.verify.ranks import rank_context, run_ranks
from megatron.tools.verify.request import Layout, Request

_SAVED_ITERATIONS = 5
"""Up to so many, a checkpoint after each iteration takes less time than to start a second run."""


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
    trainer = _Trainer(request, request.run(layouts[0]), time_limit)
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


class _Trainer:
    """Trains on layouts and reads what they computed."""

    def __init__(self, request: Request, run: RunConfig, time_limit: float) -> None:
        self._request, self._optim, self._time_limit = request, run.optim, time_limit
        prepare_environment(os.environ)  # of the process that the ranks are forks of
        self._context = rank_context(run.parallel.device)

    def train(self, layout: Layout) -> tuple[Result | None, str | None]:
        """What ``layout`` computes, or why its run failed.

        The gradients of the first step are in the checkpoint after it. A run of few iterations saves after each; a
        longer one saves at its end, and a second run ends with the first step.
        """
        with tempfile.TemporaryDirectory(prefix="verify_layout.", ignore_cleanup_errors=True) as root:
            run = short = Path(root) / "run"
            saves_all = self._request.iterations <= _SAVED_ITERATIONS
            try:
                if failure := self._run(layout, run, self._request.iterations, 1 if saves_all else None):
                    return None, failure
                step = first_step(run)
                if not saves_all and step + 1 < self._request.iterations:
                    short = Path(root) / "first"
                    if failure := self._run(layout, short, step + 1):
                        return None, failure
                return read_result(run, short, self._optim), None
            except CheckpointError as error:
                return None, str(error)

    def _run(self, layout: Layout, folder: Path, iterations: int, save_interval: int | None = None) -> str | None:
        folder.mkdir()
        command = self._request.command(layout, folder, iterations, save_interval or iterations)
        log = folder / "log.txt"
        return run_ranks(self._context, layout.processes, command, self._request.environ, log, self._time_limit)


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


def as_json(results: Sequence[LayoutResult], *, bounds: Bounds, iterations: int) -> str:
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
    return json.dumps({"tolerances": bounds._asdict(), "iterations": iterations, "layouts": layouts}, indent=2)


def _finite(values: dict) -> dict:
    return {key: None if value == math.inf else value for key, value in values.items()}
