"""Training programs from start to end: ``pretrain_gpt2.py``, and a program of one file as in nanoGPT.

Both read the same tokens, train the same model, clip, step with fused AdamW on a cosine schedule and print the loss
every ``LOG_INTERVAL`` iterations (``program_ranks.py``). The speed is that of the iterations after the first few, with
everything that happens between them; a process for each, one after the other.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparing import Comparison, Result, Seconds, alternate
from benchmarks.measures.ranks import ROOT, reported
from benchmarks.measures.shapes import SHAPES, Shape
from megatron.config.errors import LaunchError
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder

ITERATIONS, WARM_UP, LOG_INTERVAL = 20, 3, 10
TOKENS = 1_000_000
A = SHAPES["A"]
GOALS = {"fp32": 1.05, "bf16": 1.10}


def measure(rounds: int) -> list[Result]:
    """Shape A in fp32 and in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = _write_tokens(Path(folder), A)
        return [_compared(dtype, prefix, rounds) for dtype in GOALS]


def _compared(dtype: str, prefix: str, rounds: int) -> Result:
    ways = {name: partial(_iterations, name, dtype, prefix) for name in ("suite", "one file")}
    times = alternate(ways, rounds, warm_up=0)
    what = f"A {dtype}: {A}, {ITERATIONS} iterations"
    tokens = ITERATIONS * A.tokens
    return Comparison(what, "a loop as in nanoGPT", times["suite"], times["one file"], tokens, "tokens", GOALS[dtype])


def _iterations(program: str, dtype: str, prefix: str) -> Seconds:
    """Time of the iterations of a new process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.measures.program_ranks", program, dtype, prefix]
    environ = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    found = reported(ended.stdout)
    if ended.returncode or not found:
        raise LaunchError(f"{' '.join(command[3:])} failed:\n{ended.stderr.strip()[-2000:]}")
    return Seconds(**found[0])


def _write_tokens(folder: Path, shape: Shape) -> str:
    """A data set of random tokens and its vocabulary; the prefix of their names."""
    prefix = str(folder / "text")
    with IndexedDatasetBuilder(prefix, np.dtype("u2")) as builder:
        for document in np.random.RandomState(1).randint(shape.vocabulary, size=(100, TOKENS // 100)):
            builder.add_sequence(document)
            builder.end_document()
    words = ["<|endoftext|>", "<unk>", *(f"w{number}" for number in range(shape.vocabulary - 2))]
    Path(f"{prefix}.json").write_text("{" + ", ".join(f'"{word}": {n}' for n, word in enumerate(words)) + "}")
    return prefix
