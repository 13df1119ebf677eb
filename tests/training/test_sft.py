"""Instruction tuning: the masked loss of transformers on the same conversations, and the same on every layout."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.programs import read_metrics
from support.training import RankTraining
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.checkpoint.huggingface import joined
from megatron.config import ActivationConfig, DataConfig, ModelConfig, ParallelConfig
from megatron.data.datasets import build_datasets
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.data.loader import sft_batch
from megatron.engines.containers import sequential_model
from megatron.model.huggingface import config_of as read_config
from megatron.model.huggingface import source_shapes
from megatron.parallel.layout import ParallelLayout
from megatron.tools.preprocess.job import Job
from megatron.tools.preprocess.preprocess import preprocess

CONVERSATIONS = [[3, 7, 1, 4, 9, 9, 2, 4], [5, 4, 8, 6, 2]]
"""Token 4 ends turns, so that a document is not what lies between two of them."""
MASKS = [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1]]


def test_loss_and_gradients_are_those_of_transformers(run_ranks, tmp_path: Path) -> None:
    for name, documents in (("data", CONVERSATIONS), ("data_loss_mask", MASKS)):
        with IndexedDatasetBuilder(tmp_path / name, "u2" if name == "data" else "u1") as builder:
            for document in documents:
                builder.add_document(document)
    run_ranks(1, compare, str(tmp_path / "data"), reference())


class Reference(NamedTuple):
    """The loss of each conversation by itself, their sum over all counted tokens, in our names."""

    config: ModelConfig
    weights: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


def reference() -> Reference:
    """What transformers computes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=11,
            initializer_range=0.3,
            eos_token_id=4,
        )
    ).float()
    total = 0.0
    for tokens, mask in zip(CONVERSATIONS, MASKS, strict=True):
        labels = torch.tensor([tokens]).where(torch.tensor([mask]).bool(), -100)
        logits = theirs(torch.tensor([tokens])).logits
        total = total + F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum", ignore_index=-100)
    expected = total / sum(map(sum, MASKS))
    expected.backward()

    config = replace(
        read_config(theirs.config.to_dict(), Path("config.json")),
        attention_dropout=0.0,
        reset_attention_mask=True,
        reset_position_ids=True,
    )
    state = {name: (parameter.detach(), parameter.grad) for name, parameter in theirs.named_parameters()}
    weights, gradients = (
        {name: joined(name, [state[source][part] for source in sources], config) for name, sources in names}
        for part, names in enumerate([[*source_shapes(config).items()]] * 2)
    )
    return Reference(config, weights, expected.detach(), gradients)


def compare(prefix: str, expected: Reference) -> None:
    """The loss of both conversations in one sample."""
    from megatron.training.data_iterators import weighted

    layout = ParallelLayout.create(ParallelConfig())
    ours = sequential_model(expected.config, ActivationConfig(), layout)
    ours.load_state_dict(expected.weights)
    data = DataConfig(data_path=(prefix,), seq_length=16, split="1", sft=True)
    sizes = {"global_batch_size": 1, "train_iters": 1, "eval_interval": 1, "eval_iters": 0}
    sample = build_datasets(data, **sizes, vocab_size=11, seed=1).train[0]
    [(tokens, targets)] = weighted(
        iter([sft_batch(torch.from_numpy(sample[None]))]), [1], layout.data_group, masks=True
    )
    loss = ours(tokens, targets)
    assert_close(loss, expected.loss)
    loss.backward()
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, expected.gradients[name])


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
    settings = "--sft --split 8,1,1 --train-iters 4 --batch-size 2 --global-batch-size 4 --attention-dropout 0"
    more = "--hidden-dropout 0 --eval-iters 1 --eval-interval 2 --metrics-file"

    def run(processes: int, flags: str) -> list[tuple[float, float]]:
        metrics = tmp_path / f"metrics{flags.replace(' ', '')}"
        output = in_ranks(processes, *settings.split(), *more.split(), metrics, *flags.split())
        assert "documents in" in output and "longer than a sample, cut at the end" in output
        assert "of no effect, as their answers come after the cut" in output
        return [(line["lm_loss"], line["grad_norm"]) for line in read_metrics(metrics) if "lm_loss" in line]

    return run


def test_layouts_agree(train) -> None:
    """The mean over the targets of a global batch, although ranks and micro-batches have different numbers of them."""
    alone = train(1, "--batch-size 4")
    assert len(alone) == 4
    for flags in (
        "--model-parallel-size 2 --sequence-parallel --zero-stage 1",
        "--zero-stage 2",
        "--batch-size 1",
        "--batch-size 1 --context-parallel-size 2",
        "--batch-size 1 --pipe-parallel-size 2",
    ):
        assert_close(train(2, flags), alone, rtol=1e-5, atol=1e-5)
