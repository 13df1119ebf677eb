"""fp16 beside fp32: the same losses on every layout, through the whole life of a loss scale.

On the CPU, where this project refuses fp16 and ``support.fp16_pretrain`` lifts that.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from support.programs import TINY_MODEL, Programs, read_metrics

LOSS_BOUND, NORM_BOUND = 1e-4, 3e-3
"""Relative differences from fp32 that fp16's rounding explains."""
ITERATIONS = 8
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 0 --make-vocab-size-divisible-by 2"
)
FP16 = "--fp16 --initial-loss-scale 4096 --loss-scale-window 2"
OVERFLOWS = (4, 5)
SCALES = [4096, 4096, 8192, 8192, 4096, 4096, 4096, 8192]
"""After each iteration. Two iterations without overflow, and the next one doubles; of the overflows the first uses up
the hysteresis, and the second halves."""
LAYOUTS = {
    "zero0-tp2": f"{FP16} --zero-stage 0 --model-parallel-size 2 --batch-size 4",
    "zero1-zbh1-fp32-sums": f"{FP16} --pipe-parallel-size 2 --pipeline-schedule zbh1 --grad-accum-dtype fp32",
    "zero2-dp2": f"{FP16} --zero-stage 2",
    "zero3-dp2": f"{FP16} --zero-stage 3",
}
LATE = "zero2-dp2"
"""Of this one the host learns one iteration later, as from a GPU, what a step has come to."""
RESUMED = ("zero0-tp2", "zero3-dp2")
"""The first is the layout that saves, as which ZeRO 0 runs."""
STILL_SCALE = "--fp16 --loss-scale 256 --zero-stage 1"
GROWING_SCALE = "--fp16 --initial-loss-scale 256 --loss-scale-window 1 --zero-stage"
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_allow_untested_optimizer": True}
"""Its steps are as long as the gradient, of which Adam's hide a factor."""


class Run(NamedTuple):
    """A training run."""

    flags: str
    overflows: tuple[int, ...] = OVERFLOWS
    """Iterations of this run, counted from 1, in which the gradient is infinite, only on the last rank."""


Metrics = dict[str, list[dict]]
"""Of each run, by its name."""


@pytest.fixture(scope="module")
def on_two_ranks(run_ranks_once, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """Every layout; and a run saved between its overflows, when one more halves the loss scale, resumed on two."""
    folder = tmp_path_factory.mktemp("two_ranks")
    checkpoint = folder / "checkpoint"
    saved = f"{FP16} --zero-stage 1 --model-parallel-size 2 --batch-size 4 --save {checkpoint}"
    saved += f" --exit-interval {OVERFLOWS[0]}"
    runs = {name: Run(flags) for name, flags in LAYOUTS.items()}
    runs["late"] = Run(LAYOUTS[LATE])
    runs["saved"] = Run(saved, OVERFLOWS[:1])
    runs |= {f"resumed on {name}": Run(f"{LAYOUTS[name]} --load {checkpoint}", (1,)) for name in RESUMED}
    return train(run_ranks_once, 2, [*programs.data_arguments, *SETTINGS.split()], runs, folder)


@pytest.fixture(scope="module")
def on_one_rank(run_ranks_once, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """The reference in fp32, which skips the same iterations; and runs with a constant and with growing scales."""
    folder = tmp_path_factory.mktemp("one_rank")
    (folder / "sgd.json").write_text(json.dumps(SGD))
    sgd = f"--batch-size 8 --train-iters 4 --lr 0.5 --clip-grad 0 --deepspeed_config {folder / 'sgd.json'}"
    runs = {"fp32": Run("--batch-size 8"), "still": Run(f"{sgd} {STILL_SCALE}", ())}
    runs |= {f"growing at zero{stage}": Run(f"{sgd} {GROWING_SCALE} {stage}", ()) for stage in (1, 2, 3)}
    return train(run_ranks_once, 1, [*programs.data_arguments, *SETTINGS.split()], runs, folder)


def train(run_ranks_once, processes: int, words: list[str], runs: dict[str, Run], folder: Path) -> Metrics:
    run_ranks_once(processes, train_in_turn, [*TINY_MODEL, *words], runs, folder)
    return {name: read_metrics(folder / name) for name in runs}


def train_in_turn(words: list[str], runs: dict[str, Run], folder: Path) -> None:
    """On a rank: one run after the other, each with its metrics in a file of its name."""
    import torch.distributed as dist
    from support.fp16_pretrain import allow_fp16, overflows_planted
    from support.training import pretrain

    from megatron.engines import engine
    from megatron.engines.status import HostCopy

    class LateCopy(HostCopy):
        has_arrived = property(lambda _: False, lambda *_: None)  # type: ignore[assignment]

        def read(self) -> dict:
            return self._values

    allow_fp16()
    for name, (flags, overflows) in runs.items():
        engine.HostCopy = LateCopy if name == "late" else HostCopy  # type: ignore[misc]
        with overflows_planted(dict.fromkeys(overflows, dist.get_world_size() - 1)):
            code, output = pretrain([*words, *flags.split(), "--metrics-file", str(folder / name)])
        assert code == 0, output


def compare(found: list[dict], expected: list[dict]) -> None:
    assert [line["skipped_iterations"] for line in found] == [line["skipped_iterations"] for line in expected]
    assert [line["loss_scale"] for line in found] == SCALES[-len(found) :]
    for one, other in zip(found, expected, strict=True):
        for name, bound in (("lm_loss", LOSS_BOUND), ("grad_norm", NORM_BOUND), ("learning_rate", 0)):
            assert (one[name] or 0) == pytest.approx(other[name] or 0, rel=bound), (one["iteration"], name)


@pytest.mark.parametrize("layout", [*LAYOUTS, "late"])
def test_a_layout_has_the_losses_of_fp32(on_two_ranks: Metrics, on_one_rank: Metrics, layout: str) -> None:
    """The loss scale doubles, and an overflow on only one rank is skipped by all, twice."""
    found, expected = on_two_ranks[layout], on_one_rank["fp32"]
    assert [line["grad_norm"] is None for line in found] == [step in OVERFLOWS for step in range(1, ITERATIONS + 1)]
    assert max(line["grad_norm"] for line in expected if line["grad_norm"]) > 0.4, "nothing was clipped"
    compare(found, expected)


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_continues_with_the_loss_scale(on_two_ranks: Metrics, on_one_rank: Metrics, layout: str) -> None:
    """On the layout that saved and on another; with what is left of the hysteresis, which one overflow uses up."""
    compare(on_two_ranks[f"resumed on {layout}"], on_one_rank["fp32"][OVERFLOWS[0] :])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_growing_scale_does_not_shorten_a_step(on_one_rank: Metrics, stage: int) -> None:
    """The scale doubles in every step but the first; gradients are divided by the one that they were computed with."""
    found, expected = on_one_rank[f"growing at zero{stage}"], on_one_rank["still"]
    assert [line["loss_scale"] for line in found] == [256, 512, 1024, 2048]
    for name in ("lm_loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-3), name


def test_overflow_at_the_smallest_scale_ends_the_run(programs: Programs) -> None:
    words = f"{SETTINGS} {FP16} --min-scale 2048 --hysteresis 1".split()
    overflows = " ".join(f"{iteration}:0" for iteration in range(3, ITERATIONS))
    finished = programs.warm(
        1, "tests/support/fp16_pretrain.py", *TINY_MODEL, *programs.data_arguments, *words, OVERFLOWS=overflows
    )
    assert finished.returncode == 5, finished.output
    assert "error: gradients overflow even at the smallest loss scale, --min-scale: lower --lr" in finished.output
    assert f"iteration 3/{ITERATIONS}" in finished.output and f"iteration 4/{ITERATIONS}" not in finished.output
    assert "Traceback" not in finished.output
