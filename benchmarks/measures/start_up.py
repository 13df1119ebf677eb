"""From the command to the end of the first step, against importing torch and deepspeed, which comes first in each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.comparing import Comparison, alternate
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder

ROOT = Path(__file__).parents[2]
VOCABULARY = 100
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --batch-size 2 --train-iters 1"
REST = "--lr 1e-3 --eval-iters 0 --num-workers 0 --tokenizer-type WhitespaceTokenizer"


def measure(rounds: int) -> list[Comparison]:
    """A run of one step on one process; and a wrong flag, which is answered before torch is imported."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*TINY.split(), *REST.split(), *_data(Path(folder))]
        ways = {
            "run": _command("pretrain_gpt2.py", *words),
            "wrong": _command("pretrain_gpt2.py", *words, "--model-parallel-size", "3", expected=2),
            "imports": _command("-c", "import torch, deepspeed"),
        }
        times = alternate(ways, rounds)
    imports = times["imports"]
    return [
        Comparison("command to the end of a run of one step", "importing both", times["run"], imports, 1, "starts"),
        Comparison("command to the answer to a wrong flag", "importing both", times["wrong"], imports, 1, "starts", 2),
    ]


def _data(folder: Path) -> list[str]:
    prefix, vocabulary = str(folder / "text"), folder / "vocab.json"
    with IndexedDatasetBuilder(prefix, np.dtype("u2")) as builder:
        builder.add_sequence(np.arange(10_000) % VOCABULARY)
        builder.end_document()
    words = ["<|endoftext|>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 2))]
    vocabulary.write_text("{" + ", ".join(f'"{word}": {number}' for number, word in enumerate(words)) + "}")
    return ["--data-path", prefix, "--vocab-file", str(vocabulary), "--split", "1,0,0"]


def _command(*words: str, expected: int = 0) -> Callable[[], None]:
    def start() -> None:
        command = [sys.executable, "-W", "ignore", *words]
        ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        if ended.returncode != expected:
            raise RuntimeError(f"{' '.join(words)}: exit code {ended.returncode}\n{ended.stderr}")

    return start
