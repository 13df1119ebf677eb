"""fp16 beside fp32: the same losses on every layout, through the whole life of a loss scale.

On the CPU, where this project refuses fp16 and ``support.fp16_pretrain`` lifts that.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs, read_metrics

LOSS_BOUND, NORM_BOUND = 1e-4, 3e-3
"""Relative differences from fp32 that fp16's rounding explains."""
ITERATIONS = 10
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0"
    " --clip-grad 0.4 --eval-iters 0 --make-vocab-size-divisible-by 2"
).split()
FP16 = "--fp16 --initial-loss-scale 4096 --loss-scale-window 2".split()
OVERFLOWS = (4, 5)
SCALES = [4096, 4096, 8192, 8192, 4096, 4096, 4096, 8192, 8192, 16384]
"""After each iteration. Two iterations without overflow, and the next one doubles; of the overflows the first uses up
the hysteresis, and the second halves."""
LAYOUTS = {
    "zero0-tp2": (2, "--zero-stage 0 --model-parallel-size 2"),
    "zero0-pp2": (2, "--zero-stage 0 --pipe-parallel-size 2"),
    "zero1-pp2-fp32-sums": (2, "--zero-stage 1 --pipe-parallel-size 2 --grad-accum-dtype fp32"),
    "zero2-dp2": (2, "--zero-stage 2"),
    "zero3-dp2": (2, "--zero-stage 3"),
}


def pretrain_in_fp16(words: list[str], overflows: dict[int, int]) -> tuple[int, str]:
    """On a rank: exit code and output of a run, whose gradient overflows in these iterations on the given ranks."""
    from support.fp16_pretrain import allow_fp16, plant_overflows
    from support.training import pretrain

    allow_fp16()
    plant_overflows(overflows)
    return pretrain(words)


Train = Callable[..., list[dict]]


@pytest.fixture(scope="module")
def train(run_ranks_once, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train(processes, *words, overflows=...)``: metrics of a run whose last rank overflows in some iterations."""

    def run(processes: int, *words: str | Path, overflows: tuple[int, ...] = OVERFLOWS) -> list[dict]:
        metrics = tmp_path_factory.mktemp("fp16") / "metrics"
        words = (*TINY_MODEL, *programs.data_arguments, *SETTINGS, *words, "--metrics-file", metrics)
        faults = dict.fromkeys(overflows, processes - 1)
        outputs = run_ranks_once(processes, pretrain_in_fp16, [str(word) for word in words], faults)
        assert all(code == 0 for code, _ in outputs), outputs
        return read_metrics(metrics)

    return run


@pytest.fixture(scope="module")
def in_fp32(train: Train) -> list[dict]:
    """The metrics of one process, which skips the same two iterations."""
    return train(1)


def compare(found: list[dict], expected: list[dict]) -> None:
    assert [line["skipped_iterations"] for line in found] == [line["skipped_iterations"] for line in expected]
    assert [line["loss_scale"] for line in found] == SCALES[-len(found) :]
    for one, other in zip(found, expected, strict=True):
        for name, bound in (("lm_loss", LOSS_BOUND), ("grad_norm", NORM_BOUND), ("learning_rate", 0)):
            assert (one[name] or 0) == pytest.approx(other[name] or 0, rel=bound), (one["iteration"], name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_losses_of_fp32(train: Train, in_fp32: list[dict], layout: str) -> None:
    """The loss scale doubles, and an overflow on one rank alone is skipped by all, twice."""
    processes, flags = LAYOUTS[layout]
    found = train(processes, *FP16, *flags.split())
    assert [line["grad_norm"] is None for line in found] == [step in OVERFLOWS for step in range(1, ITERATIONS + 1)]
    assert max(line["grad_norm"] for line in in_fp32 if line["grad_norm"]) > 0.4, "nothing was clipped"
    compare(found, in_fp32)


@pytest.fixture(scope="module")
def checkpoint(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved between the two overflows, when one more halves the loss scale."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tensor_parallel = "--model-parallel-size 2 --zero-stage 1".split()
    train(2, *FP16, *tensor_parallel, "--save", folder, "--exit-interval", str(OVERFLOWS[0]), overflows=OVERFLOWS[:1])
    return folder


@pytest.mark.parametrize("layout", ["zero0-tp2", "zero3-dp2"])
def test_a_resumed_run_continues_with_the_loss_scale(
    train: Train, in_fp32: list[dict], checkpoint: Path, layout: str
) -> None:
    """On the layout that saved, which ZeRO 0 is as well, and on another; with what is left of the hysteresis."""
    processes, flags = LAYOUTS[layout]
    found = train(processes, *FP16, *flags.split(), "--load", checkpoint, overflows=(1,))
    compare(found, in_fp32[OVERFLOWS[0] :])


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_allow_untested_optimizer": True}
"""Its steps are as long as the gradient, of which Adam's hide a factor."""
STILL_SCALE = "--loss-scale 256 --zero-stage 1"
GROWING_SCALE = "--initial-loss-scale 256 --loss-scale-window 1 --zero-stage"


def metrics_of_runs(words: list[str], runs: list[str], folder: str) -> list[list[dict]]:
    """On a rank: the metrics of each run, one after the other."""
    found = []
    for number, run in enumerate(runs):
        metrics = Path(folder, str(number))
        code, output = pretrain_in_fp16([*words, *run.split(), "--metrics-file", str(metrics)], {})
        assert code == 0, output
        found.append(read_metrics(metrics))
    return found


def test_a_growing_scale_does_not_shorten_a_step(run_ranks_once, programs: Programs, tmp_path: Path) -> None:
    """The scale doubles in every step but the first; gradients are divided by the one that they were computed with."""
    config = tmp_path / "sgd.json"
    config.write_text(json.dumps(SGD))
    settings = "--train-iters 5 --batch-size 4 --lr 0.5 --clip-grad 0 --eval-iters 0 --fp16 --deepspeed_config".split()
    words = [str(word) for word in (*TINY_MODEL, *programs.data_arguments, *settings, config)]
    runs = [STILL_SCALE, *(f"{GROWING_SCALE} {stage}" for stage in (1, 2, 3))]
    ((expected, *others),) = run_ranks_once(1, metrics_of_runs, words, runs, str(tmp_path))
    for found in others:
        assert [line["loss_scale"] for line in found] == [256, 512, 1024, 2048, 4096]
        for name in ("lm_loss", "grad_norm"):
            assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-3), name


def test_overflow_at_the_smallest_scale_ends_the_run(programs: Programs) -> None:
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *FP16, "--min-scale", "2048", "--hysteresis", "1"]
    overflows = " ".join(f"{iteration}:0" for iteration in range(3, ITERATIONS))
    finished = programs.warm(1, "tests/support/fp16_pretrain.py", *words, OVERFLOWS=overflows)
    assert finished.returncode == 5, finished.output
    assert "error: gradients overflow even at the smallest loss scale, --min-scale: lower --lr" in finished.output
    assert "iteration  3/10" in finished.output and "iteration  4/10" not in finished.output
    assert "Traceback" not in finished.output
