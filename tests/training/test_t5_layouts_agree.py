"""The central test for T5: every layout gives the same losses, gradient norms and weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.audits import check_audit_of_sentences
from support.programs import read_metrics
from support.training import RankTraining

TOLERANCE = 1e-4
ITERATIONS = 3
SETTINGS = (
    f"--decoder-num-layers 4 --decoder-seq-length 12 --vocab-extra-ids 9 --train-iters {ITERATIONS} --batch-size 2"
    " --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --clip-grad 0.4 --eval-iters 1 --eval-interval 3"
).split()
SPLIT = "--pipeline-model-parallel-split-rank"
LAYOUTS = {
    "tp2-selective": (2, "--model-parallel-size 2 --recompute-granularity selective"),
    "pp2-split1-zero1-recompute": (2, f"--pipe-parallel-size 2 {SPLIT} 1 --zero-stage 1 --checkpoint-activations"),
    "dp2": (2, ""),
    "plain-dp2-zero2": (2, "--zero-stage 2"),
    "plain-dp2-zero3": (2, "--zero-stage 3 --checkpoint-activations --checkpoint-num-layers 3"),
    "tp2-pp2-both-on-a-stage": (
        4,
        "--model-parallel-size 2 --pipe-parallel-size 2 --pipeline-partition 5,3 --checkpoint-activations",
    ),
    "pp4-split1": (4, f"--pipe-parallel-size 4 {SPLIT} 1"),
    "pp4-split2": (4, f"--pipe-parallel-size 4 {SPLIT} 2 --zero-stage 1"),
    "pp4-split3": (4, f"--pipe-parallel-size 4 {SPLIT} 3"),
}
COMPARED = {"lm_loss", "grad_norm", "learning_rate", "validation_loss", "test_loss"}


@pytest.fixture(scope="module")
def train(train_t5_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """``train(processes, flags)``: a new folder with the metrics and the checkpoint of a run."""
    return lambda processes, flags: train_t5_in_ranks.into_folder(
        tmp_path_factory.mktemp("layout"), processes, *SETTINGS, *flags.split()
    )


@pytest.fixture(scope="module")
def one_process(train) -> Path:
    return train(1, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_agrees_with_one_process(train, run_ranks, one_process, layout):
    folder = train(*LAYOUTS[layout])
    expected, found = read_metrics(one_process / "metrics"), read_metrics(folder / "metrics")
    assert len(found) == len(expected) == ITERATIONS + 2  # a validation and the test
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & COMPARED:
            assert other[name] == pytest.approx(one[name], rel=TOLERANCE), (layout, one["iteration"], name)
    assert any(line.get("grad_norm", 0) > 0.4 for line in expected), "clipping had nothing to do"
    (differences,) = run_ranks(1, compare_weights, str(one_process / "checkpoint"), str(folder / "checkpoint"))
    assert not differences


def compare_weights(one: str, other: str) -> list[str]:
    """Names of the weights that differ between two checkpoints, each brought together from its ranks."""
    import torch

    first, second = (whole_t5(folder) for folder in (one, other))
    assert first.keys() == second.keys() and len(first) > 60
    return [name for name in first if not torch.allclose(first[name], second[name], rtol=TOLERANCE, atol=TOLERANCE)]


def whole_t5(folder: str):
    """All weights of the newest checkpoint, by name."""
    from support.whole_models import load_weights

    from megatron.checkpoint.tracker import newest
    from megatron.config import ActivationConfig, ParallelConfig
    from megatron.model.architectures import T5
    from megatron.model.containers import SequentialModel
    from megatron.mpu import ParallelLayout

    saved = newest(folder)
    config, layout = saved.whole_model_config(), ParallelLayout.create(ParallelConfig(world_size=1))
    model = SequentialModel(T5.build_layers(config, layout), T5.build_loss(config, layout), ActivationConfig())
    load_weights(model, saved)
    return dict(model.named_parameters())


def test_the_audit_names_the_sentences_of_a_text(one_process):
    check_audit_of_sentences(one_process, ITERATIONS, 8)


def test_t5_resumes_from_a_checkpoint_of_another_layout(train_t5_in_ranks: RankTraining, one_process, tmp_path):
    """Tables of relative positions are divided by heads, and held by each stage of their stack."""
    saved = ("--model-parallel-size", "2", "--exit-interval", "2", "--save", tmp_path / "checkpoint")
    train_t5_in_ranks(2, *SETTINGS, *saved)
    resumed = ("--pipe-parallel-size", "2", "--load", tmp_path / "checkpoint", "--metrics-file", tmp_path / "metrics")
    output = train_t5_in_ranks(2, *SETTINGS, *resumed)
    assert "resuming after iteration 2" in output and "converted from TP 2" in output
    expected, found = (read_metrics(folder / "metrics") for folder in (one_process, tmp_path))
    expected, found = ([line["lm_loss"] for line in lines if "lm_loss" in line] for lines in (expected, found))
    assert found == pytest.approx(expected[2:], rel=1e-5)


def test_t5_begins_with_the_weights_of_a_hugging_face_folder(train_t5_in_ranks: RankTraining, run_ranks, tmp_path):
    """Each rank reads its shards: losses are those of one process, and not those of random weights."""
    run_ranks(1, write_folder, tmp_path / "hf")
    losses = []
    for ranks, words in ((1, ""), (2, "--model-parallel-size 2"), (2, "--pipe-parallel-size 2")):
        metrics = tmp_path / f"metrics{len(losses)}"
        of_run = ("--load-hf", tmp_path / "hf", "--eval-iters", "0", "--metrics-file", metrics, *words.split())
        train_t5_in_ranks(ranks, *SETTINGS, *of_run)
        losses.append(read_metrics(metrics)[0]["lm_loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=TOLERANCE)
    assert losses[0] > 4.5, "the weights are large: random ones would guess"


def write_folder(folder: Path) -> None:
    from support.command_lines import parse
    from support.whole_models import made_up_weights

    from megatron.tools.convert.huggingface import write_huggingface
    from megatron.tools.convert.whole_model import WholeModel

    words = "t5 --hidden-size 32 --decoder-num-layers 4 --attention-dropout 0 --hidden-dropout 0"
    config = replace(parse(words).model, vocab_size=48, padded_vocab_size=48, decoder_start_token=0, eod_token=1)
    weights = {name: 5 * weight for name, weight in made_up_weights(config).items()}
    write_huggingface(folder, WholeModel(config, weights), None, max_shard_size=20_000, carried={})
