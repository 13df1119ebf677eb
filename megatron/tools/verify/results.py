"""Trains on one layout after the other, compares each with its reference, and reports the differences."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.common.errors import LaunchError
from megatron.tools.verify.compare import SAFETY, Bounds, Differences, Result, compare, rounding_effects
from megatron.tools.verify.request import Layout, Request, reference_of
from megatron.tools.verify.runs import Trainer

_ROUNDING = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Relative size of rounding errors, by the data type of the computation."""
_MOST_RUNS = 3
"""Perturbed runs of the reference. With a single run, a number may by chance differ by far less than usual."""


@dataclass(frozen=True)
class LayoutResult:
    """Whether a layout computes what its reference computes."""

    layout: Layout
    seconds: float
    differences: Differences | None
    """Differences from its reference; None if the run failed."""
    failure: str | None = None
    reference: Layout | None = None
    """Its reference, if it is not the first layout because the auxiliary loss differs there."""

    @property
    def agrees(self) -> bool:
        """Whether all comparable quantities are within the bounds."""
        return self.differences is not None and self.differences.agree

    @property
    def summary(self) -> str:
        """agrees, failed, or the first quantity that differs."""
        if self.differences is None:
            return "failed"
        if not self.agrees:
            return f"differs, first in {self.differences.first}"
        if self.reference == self.layout:
            return "agrees in the first loss"
        other = f" with {self.reference.name}" if self.reference else ""
        return f"agrees{other}{' within rounding' if self.differences.is_rounding else ''}"


class Comparison:
    """Compares runs with references; if rounding may explain a difference, measures it with perturbed references."""

    def __init__(self, request: Request, bounds: Bounds, time_limit: float) -> None:
        run = request.run(request.first)
        self.trainer = Trainer(request, run, time_limit)
        self.references: dict[Layout, Result] = {}
        self._request, self._bounds, self._rounding = request, bounds, _ROUNDING[run.precision.dtype]
        self._perturbed: dict[tuple[Layout, int], list[Result]] = {}

    def differences(self, layout: Layout, result: Result) -> Differences:
        """Compare the result of ``layout`` with its reference. Raises LaunchError if the reference fails."""
        first, peer = self._request.first, reference_of(self._request, layout)
        if layout == peer:
            self.references[peer] = result
        if peer not in self.references:
            reference, failure = self.trainer.train(peer)
            if reference is None:
                raise LaunchError(f"layout {peer.name} failed: {failure}")
            self.references[peer] = reference
        if peer != first:
            from_first = compare(self.references[first], result, self._bounds)
            if from_first.kind == "initial weights" or (from_first.kind, from_first.iteration) == ("loss", 1):
                return from_first
            if layout == peer:
                return dataclasses.replace(from_first, first=None)
        return self.compare(peer, self.references[peer], result)

    def compare(self, layout: Layout, reference: Result, other: Result) -> Differences:
        """Compare ``other`` with ``reference``, the result of ``layout``."""
        differences = compare(reference, other, self._bounds)
        is_rounding = False
        runs = self._perturbed.setdefault((layout, len(reference.losses)), [])
        for number in range(_MOST_RUNS):
            if not differences.may_be_rounding:
                break
            if number == len(runs):
                iterations, prepare = len(reference.losses), ("perturb_weights", self._rounding, number)
                perturbed, _ = self.trainer.train(layout, iterations, prepare)
                if perturbed is None:
                    break
                runs.append(perturbed)
            rounding = rounding_effects(reference, runs[: number + 1], self._bounds)
            differences = compare(reference, other, self._bounds, rounding)
            is_rounding = differences.agree
        return dataclasses.replace(differences, is_rounding=is_rounding)


def verify_layouts(
    request: Request, layouts: Sequence[Layout], bounds: Bounds, time_limit: float
) -> Iterator[LayoutResult]:
    """Yield the result of each layout as it completes. Stops if the first layout, the reference, fails."""
    comparison = Comparison(request, bounds, time_limit)
    for layout in layouts:
        start, differences = time.monotonic(), None
        result, failure = comparison.trainer.train(layout)
        if result is not None:
            try:
                differences = comparison.differences(layout, result)
            except LaunchError as error:
                failure = str(error)
        peer = reference_of(request, layout)
        other = None if peer == layouts[0] else peer
        yield LayoutResult(layout, time.monotonic() - start, differences, failure, other)
        if layouts[0] not in comparison.references:
            return


def progress_line(number: int, total: int, result: LayoutResult) -> str:
    """The line of progress for a finished layout."""
    line = f"[{number:{len(str(total))}}/{total}] {result.layout.name}: {result.summary} ({result.seconds:.0f} s)"
    return line if result.failure is None else f"{line}, {result.failure}"


_COLUMNS = ("loss", "grad_norm", "gradient", "weights", "other_weights")


def table(results: Sequence[LayoutResult], bounds: Bounds) -> str:
    """The largest differences of each layout, and their bounds."""
    rows = [("layout", "processes", *(name.replace("_", " ") for name in _COLUMNS), "result")]
    for result in results:
        differences = [getattr(result.differences, name, None) for name in _COLUMNS]
        numbers = ["-" if number is None else f"{number:.1e}" for number in differences]
        rows.append((result.layout.name, str(result.layout.processes), *numbers, result.summary))
    rows.append(("bound", "", *(f"{bound:.1e}" for bound in bounds), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, summary in rows:
        aligned = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{name:{widths[0]}}", *aligned, summary]).rstrip())
    return "\n".join([*lines, *_notes(results)])


def _notes(results: Sequence[LayoutResult]) -> Iterator[str]:
    """Footnotes that explain qualified results."""
    if any(result.reference for result in results):
        yield (
            "\nThe value of global_aux_loss depends on the number of replicas: only the first loss is compared with "
            f"{results[0].layout.name}, and all else with a layout that has as many replicas."
        )
    if any(result.differences is not None and result.differences.is_rounding for result in results):
        yield (
            "\nWithin rounding: beyond the bounds, but by at most "
            f"{SAFETY:g} times the difference between runs of the reference from weights perturbed by rounding errors."
        )


def as_dict(
    results: Sequence[LayoutResult], bisections: Sequence[object], *, bounds: Bounds, iterations: int
) -> dict[str, Any]:
    """The report for --json. Infinite or NaN differences are null."""
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
    report = {"tolerances": bounds._asdict(), "iterations": iterations, "layouts": layouts}
    return report | {"bisections": [str(bisection) for bisection in bisections]}


def _finite(values: dict) -> dict:
    return {
        key: None if value == math.inf else value
        for key, value in values.items()
        if not isinstance(value, (list, dict))
    }
