"""What is asked for, and how a stage runs a command. No torch here."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measures.ranks import outside
from megatron.common.errors import LaunchError, UserError
from megatron.common.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 3600
"""A command that takes longer is ended."""
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


def run(plan: Plan, name: str, command: Sequence[str], **environ: str) -> None:
    """``python COMMAND`` in the project's folder, with its output in ``logs/NAME.txt``.

    Raises LaunchError with the last line of the output if it fails or takes too long.
    """
    log = plan.folder / "logs" / f"{name}.txt"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=ROOT,
            env={**outside(os.environ), **environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"not finished after {SECONDS} s, see {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise LaunchError(f"exit code {code}: {last_line(log.read_text(errors='replace'))} (see {log})")


def last_line(text: str) -> str:
    """The line that says most about a failure: the last error message, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror: " in line]
    return (errors or lines or ["no output"])[-1][:500]


def gpus(count: int) -> str:
    """How many."""
    return "1 GPU" if count == 1 else f"{count} GPUs"
