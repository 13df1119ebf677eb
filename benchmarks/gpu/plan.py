"""What is asked for, how long it may take, and how a stage runs a command. No torch here."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measures.ranks import reported, run_ranks
from megatron.common.errors import LaunchError, ResourceError, UserError

SECONDS = 1800
"""A command that takes longer is ended."""
_SHORT, _LEAST = 60, 10
"""Seconds that a command may always take while they are left, and with how many left none is started."""
_SMALL = (
    "--num-layers 4 --hidden-size {hidden} --num-attention-heads 8 --seq-length {sequence} --batch-size 2"
    " --max-position-embeddings {sequence} --mock-data --vocab-size {vocabulary} --num-workers 0 --lr 1e-3"
)
_SIZES = {"tiny": (64, 32, 128)}
_USUAL = (256, 256, 1024)
"""Hidden size, tokens of a sample and vocabulary of the model whose layouts are compared."""


class Plan(NamedTuple):
    """What is asked for."""

    sizes: Sequence[str]
    groups: Sequence[str]
    rounds: int
    quick: bool
    all_layouts: bool
    folder: Path
    minutes: float | None = None
    deadline: float = inf
    """Of all stages, by ``time.monotonic()``."""

    def time_limit(self) -> float:
        """Seconds that the next command may take: half of what is left, so that one which hangs leaves some.

        Raises ResourceError if nothing is left.
        """
        left = self.deadline - time.monotonic()
        if left < _LEAST:
            raise ResourceError(f"no time is left of --minutes {self.minutes:g}")
        return min(SECONDS, left, max(_SHORT, left / 2))

    @property
    def small_model(self) -> list[str]:
        """Flags of the model whose layouts are compared."""
        hidden, sequence, vocabulary = _SIZES.get(self.sizes[0], _USUAL)
        return _SMALL.format(hidden=hidden, sequence=sequence, vocabulary=vocabulary).split()

    @property
    def iterations(self) -> int:
        """Of the runs that are compared."""
        return 3 if self.quick else 5


@dataclass(frozen=True)
class Stage:
    """A part of the check that may fail by itself."""

    group: str
    name: str
    work: Callable[[], dict[str, Any]]
    """Returns its result. Raises ResourceError if it is not possible here, another UserError if it fails."""


class Failed(UserError):
    """A stage that failed and has a result none the less."""

    def __init__(self, message: str, result: dict[str, Any]):
        super().__init__(message)
        self.result = result


def run(plan: Plan, name: str, command: Sequence[str], ranks: int = 0, **environ: str) -> str:
    """The output of ``python COMMAND`` in the project's folder, on so many ranks, which is also in ``logs/NAME.txt``.

    Raises LaunchError with the last line of the output if it fails or takes too long, ResourceError if no time is left.
    """
    limit, log = plan.time_limit(), plan.folder / "logs" / f"{name}.txt"
    log.unlink(missing_ok=True)
    code = run_ranks(ranks, command, log, limit, **environ)
    output = log.read_text(errors="replace")
    if code is None:
        raise LaunchError(f"not finished after {limit:.0f} s: {last_line(output)} (see logs/{log.name})")
    if code:
        raise LaunchError(f"exit code {code}: {last_line(output)} (see logs/{log.name})")
    return output


def measured(plan: Plan, name: str, module: str, *words: str, ranks: int = 1) -> Any:
    """What ``benchmarks.measures.MODULE`` reports. Raises what ``run()`` does."""
    return reported(run(plan, name, ["-m", f"benchmarks.measures.{module}", *words], ranks))[0]


def named(*words: str) -> str:
    """The name of a log."""
    return re.sub("[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


def last_line(text: str) -> str:
    """The line that says most about a failure: the last error message, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror: " in line]
    return (errors or lines or ["no output"])[-1][:500]


def gpus(count: int) -> str:
    """How many."""
    return "1 GPU" if count == 1 else f"{count} GPUs"
