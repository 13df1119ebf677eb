"""What is said about a comparison: a line for each layout, a table of all, and JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.verify.comparing import Differences, Tolerances
from megatron.verify.names import Layout


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
