"""Train in ranks that have torch already: what pretrain_gpt2.py does, without a launcher and its imports.

For tests that compare many runs. How a run starts and ends is for others to show, with real launchers.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.programs import TINY_MODEL

RunRanks = Callable[..., list[Any]]


class RankTraining:
    """``pretrain_gpt2.py``, or another model's program, with the tiny model and corpus on this session's ranks."""

    def __init__(self, run_ranks: RunRanks, data_arguments: list[str], run: Callable | None = None):
        self._run_ranks, self._data, self._run = run_ranks, data_arguments, run or pretrain

    def __call__(self, processes: int, *arguments: str | Path) -> str:
        """Train to the end on that many ranks; what the first of them printed."""
        words = [str(word) for word in (*TINY_MODEL, *self._data, *arguments)]
        outputs = self._run_ranks(processes, self._run, words)
        assert all(code == 0 for code, _ in outputs), outputs
        return outputs[0][1]

    def into_folder(self, folder: Path, processes: int, *arguments: str | Path) -> Path:
        """Train with ``folder/metrics`` and ``folder/checkpoint`` as output; the folder."""
        self(processes, *arguments, "--metrics-file", folder / "metrics", "--save", folder / "checkpoint")
        return folder


def pretrain(words: list[str], architecture: str = "GPT-2") -> tuple[int, str]:
    """Exit code and output of a run with these arguments, on this rank."""
    from megatron.cli import parse_run
    from megatron.model.architectures import ARCHITECTURES
    from megatron.tools.reporting.callbacks import default_callbacks
    from megatron.training.preflight import check
    from pretrain_gpt2 import train

    with contextlib.redirect_stdout(io.StringIO()) as output:
        run, _ = check(parse_run(words, os.environ, ARCHITECTURES[architecture]))
        code = train(run, default_callbacks())
    return code, output.getvalue()


def pretrain_in_blocks(words: list[str]) -> tuple[int, str]:
    """The same with attention in a block for each document, which is otherwise for long sequences."""
    from megatron.ops import packed_attention

    packed_attention.SHORTEST_BLOCK = 4
    return pretrain(words)


def pretrain_bert(words: list[str]) -> tuple[int, str]:
    """The same as ``pretrain_bert.py``."""
    return pretrain(words, "BERT")


def pretrain_t5(words: list[str]) -> tuple[int, str]:
    """The same as ``pretrain_t5.py``."""
    return pretrain(words, "T5")


def fine_tune(words: list[str]) -> tuple[int, str]:
    """The same as ``tasks/main.py``."""
    from dataclasses import replace

    from megatron.tools.finetuning.finetune import finetune
    from megatron.tools.finetuning.request import build_parser, read_task
    from megatron.training.preflight import check

    with contextlib.redirect_stdout(io.StringIO()) as output:
        args, rest = build_parser("").parse_known_args(words)
        task = read_task(args, rest, os.environ)
        run, _ = check(task.run)
        code = finetune(replace(task, run=run), ())
    return code, output.getvalue()


@contextlib.contextmanager
def started_engine(words: list[str]) -> Iterator[tuple[Any, Any]]:
    """Layout and engine of a run with these arguments, on this rank, which can load checkpoints."""
    from megatron.checkpoint.save import Checkpointer
    from megatron.cli import parse_run
    from megatron.engines.build import build_engine
    from megatron.training.learning_rates import annealing_lr
    from megatron.training.preflight import check
    from megatron.training.setup import initialized_ranks

    run = check(parse_run(words, os.environ))[0]
    with initialized_ranks(run, []) as (layout, _):
        engine = build_engine(run, layout, annealing_lr(run))
        Checkpointer(engine, run, print)
        yield layout, engine
