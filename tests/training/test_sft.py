"""Instruction tuning on layouts; its loss is compared with that of transformers in tests/test_shipped_files.py."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import read_metrics
from support.training import RankTraining
from torch.testing import assert_close

from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess


@pytest.fixture
def train(run_ranks_once, programs, tmp_path: Path) -> Callable[[int, str], list[tuple[float, float]]]:
    """Losses and gradient norms of a run on conversations made of the tiny corpus. Of every other one the completion
    is cut off, so that samples have very different numbers of targets, and some none."""
    lines = (Path(programs.folder) / "corpus.jsonl").read_text().splitlines() if programs.data_arguments else []
    texts = [json.loads(line)["text"].split() for line in lines[:80]]
    with open(tmp_path / "pairs.jsonl", "w") as file:
        for number, words in enumerate(texts):
            middle = len(words) // 3
            prompt = words[:middle] if number % 2 else words * 3
            pair = {"prompt": " ".join(prompt), "completion": " ".join(words[middle:])}
            file.write(json.dumps(pair) + "\n")
    vocabulary = str(Path(programs.folder) / "vocab.json")
    job = Job(
        inputs=(tmp_path / "pairs.jsonl",),
        output_prefix=str(tmp_path / "pairs"),
        tokenizer_type="WhitespaceTokenizer",
        vocab_file=vocabulary,
        append_eod=True,
        conversations="prompt-completion",
    )
    preprocess(job, lambda summary: None, lambda error: None)
    data = ["--data-path", job.prefixes["tokens"], "--vocab-file", vocabulary]
    in_ranks = RankTraining(run_ranks_once, [*data, "--tokenizer-type", "WhitespaceTokenizer"])
    settings = "--sft --split 8,1,1 --train-iters 3 --batch-size 2 --global-batch-size 4 --attention-dropout 0"
    more = "--hidden-dropout 0 --eval-iters 1 --eval-interval 3 --metrics-file"

    def run(processes: int, flags: str) -> list[tuple[float, float]]:
        metrics = tmp_path / f"metrics{flags.replace(' ', '')}"
        output = in_ranks(processes, *settings.split(), *more.split(), metrics, *flags.split())
        output = " ".join(output.replace("\n> ", " ").split())  # a long line is wrapped
        assert "documents in" in output and "longer than a sample, cut at the end" in output
        assert "of no effect, as their answers come after the cut" in output
        return [(line["lm_loss"], line["grad_norm"]) for line in read_metrics(metrics) if "lm_loss" in line]

    return run


def test_layouts_agree(train) -> None:
    """The mean over the targets of a global batch, although ranks and micro-batches have different numbers of them."""
    alone = train(1, "--batch-size 4")
    assert len(alone) == 3
    for flags in (
        "--model-parallel-size 2 --sequence-parallel --zero-stage 1",
        "--batch-size 1 --zero-stage 2",
        "--batch-size 1 --context-parallel-size 2",
        "--batch-size 1 --pipe-parallel-size 2",
    ):
        assert_close(train(2, flags), alone, rtol=1e-5, atol=1e-5)
