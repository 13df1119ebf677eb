"""Training programs from start to end: ``pretrain_gpt2.py``, and a program of one file as in nanoGPT.

Both read the same tokens, train the same model, clip, step with fused AdamW on a cosine schedule and print the loss
every ``LOG_INTERVAL`` iterations (``program_ranks.py``). Each is a process of its own, which waits while the other one
iterates. The speed is that of the iterations after the first few, with everything that happens between them.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from benchmarks.comparing import Comparison, Seconds, alternate
from benchmarks.measures.ranks import ROOT, reported
from benchmarks.measures.shapes import SHAPES, Shape
from megatron.common.errors import LaunchError
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder

ITERATIONS, WARM_UP, LOG_INTERVAL = 5, 3, 5
"""Of a round; before the first round."""
TOKENS = 1_000_000
A = SHAPES["A"]
OF_THIS_PROCESS = ("THP_MEM_ALLOC_ENABLE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that each program sets itself, or does without."""


def measure(rounds: int) -> list[Comparison]:
    """Shape A in fp32 and in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = _write_tokens(Path(folder), A)
        return [_compared(dtype, prefix, rounds) for dtype in ("fp32", "bf16")]


def _compared(dtype: str, prefix: str, rounds: int) -> Comparison:
    with ExitStack() as stack:
        ways = {
            name: stack.enter_context(_Program(name, dtype, prefix, WARM_UP + rounds * ITERATIONS + 1)).iterate
            for name in ("suite", "one file")
        }
        times = alternate(ways, rounds, warm_up=0)
    what, tokens, ours = f"A {dtype}: {A}, {ITERATIONS} iterations", ITERATIONS * A.tokens, times["suite"]
    return Comparison(what, "a loop as in nanoGPT", ours, times["one file"], tokens, "tokens")


class _Program:
    """A process that has finished its warm-up, and is ended after the block."""

    def __init__(self, *words: object):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measures.program_ranks", *map(str, words)]
        environ = {name: value for name, value in os.environ.items() if name not in OF_THIS_PROCESS}
        self._errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environ, **pipes)

    def __enter__(self) -> "_Program":
        self._reported()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def iterate(self) -> Seconds:
        """The time of the next iterations."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._reported()

    def _reported(self) -> Seconds:
        for line in self._process.stdout:
            if found := reported(line):
                return Seconds(**found[0])
        self._errors.seek(0)
        raise LaunchError(f"{' '.join(self._process.args[3:])} failed:\n{self._errors.read().strip()[-2000:]}")


def _write_tokens(folder: Path, shape: Shape) -> str:
    """A data set of random tokens and its vocabulary; the prefix of their names."""
    prefix = str(folder / "text")
    with IndexedDatasetBuilder(prefix, np.dtype("u2")) as builder:
        for document in np.random.RandomState(1).randint(shape.vocabulary, size=(100, TOKENS // 100)):
            builder.add_document(document)
    words = ["<|endoftext|>", "<unk>", *(f"w{number}" for number in range(shape.vocabulary - 2))]
    Path(f"{prefix}.json").write_text("{" + ", ".join(f'"{word}": {n}' for n, word in enumerate(words)) + "}")
    return prefix
