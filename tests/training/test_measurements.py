"""Norm of the parameters, zeros in the gradient and timers: against plain torch, and the same on every layout."""

import contextlib
import io
from pathlib import Path

import pytest
from support.layouts import layout
from support.programs import read_metrics
from support.training import RankTraining
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SETTINGS = (
    "--train-iters 2 --batch-size 2 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
    " --log-params-norm --log-num-zeros-in-grad --timing-log-level 2"
)
LAYOUTS = [
    "tp2 zero2 --make-vocab-size-divisible-by 64",
    "dp2 zero3",
    "pp2 dualpipev zero1",
    "dp2 zero2 --zero-round-robin-gradients",
]
PADDING = (128 - 92) * 32
"""Elements of the embedding's rows that pad the vocabulary."""
TIMERS = {"forward-backward", "all-grads-sync", "optimizer", "batch-generator", "forward-compute", "backward-compute"}
OF_STAGES = {"embedding-grads-all-reduce", "forward-recv", "forward-send", "backward-recv", "backward-send"}


@pytest.fixture(scope="module")
def one_process(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what it printed."""
    folder = tmp_path_factory.mktemp("measured")
    outputs = ("--metrics-file", folder / "metrics", "--save", folder / "ck", "--tensorboard-dir", folder / "board")
    return folder, train_in_ranks(1, *SETTINGS.split(), *outputs)


def test_values_of_one_process(one_process: tuple[Path, str], run_ranks) -> None:
    folder, output = one_process
    lines = read_metrics(folder / "metrics")
    assert [lines[-1]["params_norm"]] == pytest.approx(run_ranks(1, norm_of_checkpoint, str(folder / "ck")))
    assert all(PADDING <= line["num_zeros_in_grad"] < PADDING + 50 for line in lines)
    zeros, norm = (lines[-1][name] for name in ("num_zeros_in_grad", "params_norm"))
    assert f" | num zeros in grad {zeros} | params norm {norm:.6g} | " in output
    assert "(min, max) time across ranks (ms):\n    forward-backward ....." in output
    for line in lines:
        timers = {name.removesuffix("-time"): value for name, value in line.items() if name.endswith("-time")}
        assert timers.keys() == TIMERS and all(value > 0 for value in timers.values())
        once = {"forward-backward", "all-grads-sync", "optimizer"}
        assert sum(timers[name] for name in TIMERS - once) < timers["forward-backward"]
        assert sum(timers[name] for name in once) < line["seconds_per_iteration"] * 1.1
    board = EventAccumulator(str(folder / "board")).Reload()
    assert {"params_norm", "num_zeros_in_grad", "optimizer-time"} <= set(board.Tags()["scalars"])


def norm_of_checkpoint(folder: str) -> float:
    """The 2-norm of all weights, brought together from the ranks."""
    import torch
    from support.whole_models import loaded_model

    return torch.nn.utils.get_total_norm([weight.double() for weight in loaded_model(folder).parameters()]).item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_measure_the_same(
    train_in_ranks: RankTraining, one_process: tuple[Path, str], tmp_path: Path, name: str
) -> None:
    processes, flags = layout(name)
    train_in_ranks(processes, *SETTINGS.split(), *flags.split(), "--metrics-file", tmp_path / "metrics")
    found, expected = read_metrics(tmp_path / "metrics"), read_metrics(one_process[0] / "metrics")
    for one, other in zip(expected, found, strict=True):
        assert other["params_norm"] == pytest.approx(one["params_norm"], rel=1e-5)
        assert other["num_zeros_in_grad"] == pytest.approx(one["num_zeros_in_grad"], abs=20)
        timers = {key.removesuffix("-time") for key in other if key.endswith("-time")}
        assert timers == (TIMERS | OF_STAGES if "pp2" in name else TIMERS)


@pytest.mark.ranks(2)
def test_timers_of_nested_phases() -> None:
    """Two iterations on each rank, whose clocks advance by hand; the second rank has a slower optimizer."""
    import torch.distributed as dist

    from megatron.parallel.pipeline.schedule import Instruction
    from megatron.training import measurements as timing

    seconds, original = [0.0], timing.now
    timing.now = lambda: seconds[0]
    timers = timing.PhaseTimers(2)
    for iteration in (1, 2):
        with timers.around_iteration(iteration) as (hook,):
            seconds[0] += 2.0
            with hook(Instruction("BackwardPass", 1)):
                seconds[0] += 2.0
                with hook(Instruction("ReduceGrads")):
                    seconds[0] += 1.0
                seconds[0] += 1.0
            with hook(Instruction("OptimizerStep")):
                seconds[0] += 2.0 + 2.0 * dist.get_rank()
    timing.now = original
    with contextlib.redirect_stdout(io.StringIO()) as output:
        values = dict(timers.metrics())
    expected = {"forward-backward": 5.0, "backward-compute": 3.0, "all-grads-sync": 1.0, "optimizer": 4.0}
    if dist.get_rank() == 0:
        assert values == {f"{name}-time": seconds for name, seconds in expected.items()}
        title, *lines = output.getvalue().splitlines()
        assert title == "(min, max) time across ranks (ms):"
        assert "    optimizer ......................................: (2000.00, 4000.00)" in lines
