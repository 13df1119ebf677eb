"""The central test for a mixture of experts: every layout gives the same losses, gradient norms and weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import read_metrics
from support.training import RankTraining

TOLERANCE = 1e-4
ITERATIONS = 4
SETTINGS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
    " --moe-shared-expert-intermediate-size 16 --swiglu --disable-bias-linear"
    f" --train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 1 --eval-interval 4 --log-interval 1 --log-params-norm"
).split()
EP = "--expert-model-parallel-size"
LAYOUTS = {
    "ep2-zero0": (2, f"{EP} 2"),
    "ep2-zero1": (2, f"{EP} 2 --zero-stage 1"),
    "ep2-zero2-recompute": (2, f"{EP} 2 --zero-stage 2 --checkpoint-activations"),
    "dp4-ep2-zero1": (4, f"{EP} 2 --zero-stage 1"),
    "tp2-sequence-zero3": (2, "--model-parallel-size 2 --sequence-parallel --zero-stage 3"),
    "tp2-ep2-zero1": (4, f"{EP} 2 --model-parallel-size 2 --zero-stage 1"),
    "pp2-ep2-zero0": (4, f"{EP} 2 --pipe-parallel-size 2"),
    "tp2-pp2-ep2-zero1-recompute": (
        8,
        f"{EP} 2 --model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1 --checkpoint-activations",
    ),
}
COMPARED = {
    "lm_loss",
    "grad_norm",
    "params_norm",
    "load_balancing_loss",
    "z_loss",
    "router_entropy",
    "largest_expert_load",
    "smallest_expert_load",
    "validation_loss",
    "test_loss",
}


@pytest.fixture(scope="module")
def train(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """``train(processes, flags)``: a new folder with the metrics and the checkpoint of a run."""
    return lambda processes, flags: train_in_ranks.into_folder(
        tmp_path_factory.mktemp("layout"), processes, *SETTINGS, *flags.split()
    )


@pytest.fixture(scope="module")
def one_process(train) -> Path:
    return train(1, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_agrees_with_one_process(train, run_ranks, one_process, layout):
    folder = train(*LAYOUTS[layout])
    compare_metrics(one_process, folder, layout)
    (differences,) = run_ranks(1, compare_weights, str(one_process / "checkpoint"), str(folder / "checkpoint"))
    assert not differences


def compare_metrics(one_process: Path, folder: Path, layout: str, after: int = 0) -> None:
    expected, found = read_metrics(one_process / "metrics"), read_metrics(folder / "metrics")
    expected = [line for line in expected if line["iteration"] > after]
    assert len(found) == len(expected) > 2
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & COMPARED:
            assert other[name] == pytest.approx(one[name], rel=TOLERANCE), (layout, one["iteration"], name)
    assert any(line.get("grad_norm", 0) > 0.4 for line in expected), "clipping had nothing to do"


def test_training_resumes_with_other_numbers_of_expert_ranks(train, one_process):
    """From one rank to two, four, and one again, each time for one iteration."""
    folder = train(1, "--exit-interval 1")
    for after, (ranks, flags) in enumerate([(2, f"{EP} 2"), (4, f"{EP} 4 --zero-stage 1"), (1, "")], start=1):
        last = "" if after == 3 else f"--exit-interval {after + 1}"
        folder = train(ranks, f"{flags} --load {folder / 'checkpoint'} {last}")
    compare_metrics(one_process, folder, "resumed", after=3)


def compare_weights(one: str, other: str) -> list[str]:
    """Names of the weights that differ between two checkpoints, each brought together from its ranks."""
    import torch
    from support.whole_models import load_weights

    from megatron.checkpoint.tracker import newest
    from megatron.config import ActivationConfig, ParallelConfig
    from megatron.model.gpt2 import GPT2Model
    from megatron.mpu import ParallelLayout

    layout, weights = ParallelLayout.create(ParallelConfig(world_size=1)), []
    for folder in (one, other):
        saved = newest(folder)
        model = GPT2Model(saved.whole_model_config(), ActivationConfig(), layout)
        load_weights(model, saved)
        weights.append(dict(model.named_parameters()))
    first, second = weights
    assert first.keys() == second.keys() and any("experts" in name for name in first)
    return [name for name in first if not torch.allclose(first[name], second[name], rtol=TOLERANCE, atol=TOLERANCE)]
