"""Time from the command to the end of the first step, compared with a plain DeepSpeed program and with imports alone.

The plain program (``bare_deepspeed.py``) trains a model of the same size. DeepSpeed compiles its extension
for inference, which this project does not build, in a start that does not count.
The answer to a wrong flag is held to a limit in seconds, and to the start of Python by itself.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.comparing import Comparison, Quantity, Result, alternate
from megatron.tools.preprocess.indexed_dataset_builder import IndexedDatasetBuilder

ROOT = Path(__file__).parents[2]
VOCABULARY = 100
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --batch-size 2 --train-iters 1"
REST = "--lr 1e-3 --eval-iters 0 --num-workers 0 --tokenizer-type WhitespaceTokenizer"
SUITE, BARE = "pretrain_gpt2.py", "benchmarks/measures/bare_deepspeed.py"
GOAL, ANSWER_LIMIT = 1 / 1.15, 0.15
"""Of a plain program's speed; seconds."""
MOST_ROUNDS = 4
"""Two of the starts are of two ranks."""


def measure(rounds: int) -> list[Result]:
    """A run of one step by python and by deepspeed; and a wrong flag, which is answered before torch is imported.

    At most ``MOST_ROUNDS``.
    """
    rounds = min(rounds, MOST_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        words = [*TINY.split(), *REST.split(), *_data(Path(folder))]
        python = [sys.executable, "-W", "ignore"]
        port = os.environ["MASTER_PORT"]
        two = [*python, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port]
        ways = {
            "run": _command(*python, SUITE, *words),
            "bare": _command(*python, BARE),
            "imports": _command(*python, "-c", "import torch, deepspeed"),
            "wrong": _command(*python, SUITE, *words, "--model-parallel-size", "3", expected=2),
            "nothing": _command(*python, "-c", "pass"),
            "run of two": _command(*two, SUITE, *words),
            "bare of two": _command(*two, BARE),
        }
        times = alternate(ways, rounds)
    pairs = [
        ("python: a run of one step", "bare DeepSpeed", "run", "bare", GOAL),
        ("deepspeed --num_gpus 2: a run of one step", "bare DeepSpeed", "run of two", "bare of two", GOAL),
        ("python: a run of one step", "importing torch and deepspeed", "run", "imports", None),
        ("python: error message for a wrong flag", "importing torch and deepspeed", "wrong", "imports", 2),
    ]
    answer, wrong = "error message for a wrong flag: time until it is there", times["wrong"].wall
    return [
        *(
            Comparison(what, peer, times[ours], times[theirs], 1, "starts", goal)
            for what, peer, ours, theirs, goal in pairs
        ),
        Quantity(answer, f"{ANSWER_LIMIT:g} s", wrong, [ANSWER_LIMIT] * rounds, "s", most=1.0),
        Quantity(answer, "python that does nothing", wrong, times["nothing"].wall, "s", is_limit=True),
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
    """Starts a program. Python keeps the bytecode of its first start for the next ones, as it does by default."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def start() -> None:
        ended = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
        if ended.returncode != expected:
            raise RuntimeError(f"{' '.join(words)}: exit code {ended.returncode}\n{ended.stderr}")

    return start
