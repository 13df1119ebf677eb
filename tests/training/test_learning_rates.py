"""Learning rates: closed forms of every style, and a scheduler that resumes where it stopped."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.common.errors import CheckpointError, ConfigError
from megatron.training.learning_rates import AnnealingLR
from megatron.training.lr_schedule import DECAYS, EXPONENTIAL_FLOOR, WSD_DECAYS, LRSchedule

PEAK, FLOOR, WARMUP, END = 8e-4, 2e-5, 20, 120

CLOSED_FORMS: dict[str, Callable[[int], float]] = {
    "constant": lambda n: PEAK,
    "linear": lambda n: PEAK - (PEAK - FLOOR) * (n - 20) / 100,
    "cosine": lambda n: FLOOR + (PEAK - FLOOR) / 2 * (1 + math.cos(math.pi * (n - 20) / 100)),
    "exponential": lambda n: PEAK * (FLOOR / PEAK) ** ((n - 20) / 100),
    "inverse-square-root": lambda n: PEAK * (20 / n) ** 0.5,
}

WSD_CLOSED_FORMS: dict[str, Callable[[int], float]] = {
    "linear": lambda n: PEAK - (PEAK - FLOOR) * (n - 90) / 30,
    "cosine": lambda n: FLOOR + (PEAK - FLOOR) / 2 * (1 + math.cos(math.pi * (n - 90) / 30)),
    "exponential": lambda n: FLOOR + (PEAK - FLOOR) * (2 * 0.5 ** ((n - 90) / 30) - 1),
    "minus_sqrt": lambda n: PEAK - (PEAK - FLOOR) * math.sqrt((n - 90) / 30),
}


def schedule(style: str, **changes: Any) -> LRSchedule:
    wsd = {"wsd_decay_iters": 30} if style == "WSD" else {}
    values = {"start_lr": PEAK, "min_lr": FLOOR, "warmup_iter": WARMUP, "end_iter": END, "decay_style": style}
    return LRSchedule(**values | wsd | changes)


@pytest.mark.parametrize("style", [*DECAYS, "WSD"])
def test_the_warm_up_is_linear_from_the_first_step_to_the_peak(style: str):
    rates = [schedule(style).learning_rate(n) for n in range(WARMUP + 1)]
    assert rates == pytest.approx([PEAK * (n + 1) / 20 for n in range(20)] + [PEAK], rel=1e-12)
    assert rates[19] == rates[20] == PEAK


@pytest.mark.parametrize("style", DECAYS)
def test_the_decay_follows_its_closed_form_to_the_end_and_stays_there(style: str):
    rate = schedule(style).learning_rate
    for n in (20, 21, 45, 70, 119):
        assert rate(n) == pytest.approx(CLOSED_FORMS[style](n), rel=1e-9)
    end = PEAK if style == "constant" else FLOOR
    assert [rate(n) for n in (120, 121, 10**9)] == [end] * 3


@pytest.mark.parametrize("style", WSD_DECAYS)
def test_wsd_is_constant_until_its_last_part(style: str):
    rate = schedule("WSD", wsd_decay_style=style).learning_rate
    assert {rate(n) for n in range(19, 91)} == {PEAK}
    for n in (91, 100, 105, 119):
        assert rate(n) == pytest.approx(WSD_CLOSED_FORMS[style](n), rel=1e-9)
    assert [rate(n) for n in (120, 121, 10**9)] == [FLOOR] * 3


def test_exponential_decay_to_zero_ends_at_its_floor():
    rate = schedule("exponential", min_lr=0.0).learning_rate
    halfway = (math.sqrt(EXPONENTIAL_FLOOR) - EXPONENTIAL_FLOOR) / (1 - EXPONENTIAL_FLOOR)
    assert rate(70) == pytest.approx(PEAK * halfway, rel=1e-9)
    assert rate(119) > rate(120) == 0.0


@pytest.mark.parametrize("style", [*DECAYS, "WSD"])
@pytest.mark.parametrize(
    ("warmup", "end", "expected"),
    [
        (0, 1, {0: PEAK, 1: FLOOR}),
        (1, 1, {0: PEAK, 1: FLOOR}),
        (4, 4, {0: PEAK / 4, 3: PEAK, 4: FLOOR}),
        (0, 2, {0: PEAK, 2: FLOOR, 3: FLOOR}),
        (0, 0, {0: FLOOR}),
    ],
)
def test_boundaries(style: str, warmup: int, end: int, expected: dict[int, float]):
    wsd = {"wsd_decay_iters": end - warmup} if style == "WSD" else {}
    rate = schedule(style, warmup_iter=warmup, end_iter=end, **wsd).learning_rate
    for n, lr in expected.items():
        assert rate(n) == (PEAK if style == "constant" and lr == FLOOR else lr)


def test_the_inverse_square_root_stays_at_the_minimum():
    rate = schedule("inverse-square-root", min_lr=PEAK / 2).learning_rate
    assert rate(79) == pytest.approx(PEAK * (20 / 79) ** 0.5, rel=1e-12)
    assert [rate(n) for n in (80, 81, 119, 120)] == [PEAK / 2] * 4


def test_without_a_warm_up_the_inverse_square_root_counts_from_one():
    rate = schedule("inverse-square-root", warmup_iter=0, end_iter=99, min_lr=PEAK / 10).learning_rate
    assert [rate(n) for n in (0, 3, 24, 99)] == pytest.approx([PEAK, PEAK / 2, PEAK / 5, PEAK / 10], rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"min_lr": 1.0}, ["--min-lr 1.0 must be between 0 and --lr 0.0008"]),
        ({"warmup_iter": 121}, ["--warmup: 121 iterations of warm-up must be between 0 and the 120"]),
        ({"end_iter": -5}, ["--lr-decay-iters -5 must be between 0 and 2^53"]),
        ({"end_iter": 1 << 60}, [f"--lr-decay-iters {1 << 60} must be between 0 and 2^53"]),
        ({"decay_style": "WSD", "wsd_decay_iters": 101}, ["--lr-wsd-decay-iters 101 must be between 0 and the 100"]),
        (
            {"decay_style": "WSD", "wsd_decay_iters": 1, "wsd_decay_style": "constant"},
            ["--lr-wsd-decay-style constant is unknown: choose one of linear, cosine"],
        ),
        (
            {"start_lr": -1.0, "warmup_iter": -1, "decay_style": "x"},
            ["--lr -1.0", "--warmup: -1", "--lr-decay-style x"],
        ),
    ],
)
def test_errors_of_a_schedule_name_every_flag(changes: dict[str, Any], expected: list[str]):
    with pytest.raises(ConfigError) as caught:
        schedule("linear", **changes)
    assert len(caught.value.messages) == len(expected)
    assert all(part in message for part, message in zip(expected, caught.value.messages, strict=True))


def optimizer(groups: int = 2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=123.0)


def scheduler(optim: torch.optim.Optimizer, style: str = "cosine", **changes: Any) -> AnnealingLR:
    values = {"start_lr": PEAK, "warmup_iter": WARMUP, "total_iters": END, "decay_style": style, "last_iter": 0}
    values |= {"min_lr": FLOOR}
    return AnnealingLR(optim, **values | changes)


def train(optim: torch.optim.Optimizer, sched: AnnealingLR, steps: int) -> list[float]:
    """The rates at which ``steps`` steps are taken."""
    rates = []
    for _ in range(steps):
        assert len({group["lr"] for group in optim.param_groups}) == 1
        rates.append(optim.param_groups[0]["lr"])
        optim.step()
        sched.step()
    return rates


def test_every_group_steps_at_the_schedule():
    optim = optimizer()
    sched = scheduler(optim)
    assert train(optim, sched, 130) == [schedule("cosine").learning_rate(n) for n in range(130)]
    assert sched.num_iters == 130
    assert sched.get_last_lr() == [FLOOR, FLOOR]


def test_a_group_may_have_a_multiple_of_the_rate():
    optim = optimizer()
    optim.param_groups[1]["lr_mult"] = 10
    sched = scheduler(optim)
    for _ in range(3):
        optim.step()
        sched.step()
        assert optim.param_groups[1]["lr"] == 10 * optim.param_groups[0]["lr"] == 10 * sched.get_last_lr()[0] > 0


def test_the_classic_order_of_arguments():
    optim = optimizer()
    sched = AnnealingLR(optim, PEAK, WARMUP, END, "cosine", 7, FLOOR, False, True)
    assert sched.state_dict() == scheduler(optimizer(), last_iter=7).state_dict()
    assert (sched.use_checkpoint_lr_scheduler, sched.override_lr_scheduler) == (False, True)
    shortest = AnnealingLR(optim, PEAK, WARMUP, END, "linear", 0)
    assert (shortest.schedule.min_lr, shortest.use_checkpoint_lr_scheduler) == (0.0, True)


def test_deepspeed_accepts_an_instance_and_a_callable(run_ranks_once):
    expected = [schedule("cosine").learning_rate(n) for n in range(4)]
    assert run_ranks_once(1, _rates_of_engines) == [[(True, 1, expected), (True, 1, expected)]]


def _rates_of_engines() -> list[tuple[bool, int, list[float]]]:
    """With an instance and with a callable: whether the engine returns an AnnealingLR, its groups and rates."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    results = []
    for is_instance in (True, False):
        module = torch.nn.Linear(2, 1)
        groups = [{"params": []}, {"params": list(module.parameters())}]  # DeepSpeed removes the empty group
        optim = torch.optim.AdamW(groups, lr=123.0)
        engine, _, _, sched = deepspeed.initialize(
            model=module, optimizer=optim, config=config, lr_scheduler=scheduler(optim) if is_instance else scheduler
        )
        rates = []
        for _ in range(4):
            rates += engine.get_lr()
            engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
            engine.step()
        assert sched.num_iters == 4
        results.append((isinstance(sched, AnnealingLR), len(optim.param_groups), rates))
    return results


def test_a_group_may_be_removed_and_another_added():
    """DeepSpeed removes the groups without parameters on a rank."""
    optim = optimizer(3)
    sched = scheduler(optim)
    del optim.param_groups[1]
    train(optim, sched, 1)
    optim.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    sched.step()
    assert sched.get_last_lr() == [PEAK * 3 / 20] * 3
    state = scheduler(optimizer(5)).state_dict()
    sched.load_state_dict(state)
    assert sched.get_last_lr() == [group["lr"] for group in optim.param_groups] == [PEAK / 20] * 3


@pytest.mark.parametrize("style", [*DECAYS, "WSD"])
@pytest.mark.parametrize("stop", [5, 20, 50, 125])
def test_stop_and_resume_equals_not_stopping(style: str, stop: int):
    wsd = {"wsd_decay_iters": 30, "wsd_decay_style": "minus_sqrt"} if style == "WSD" else {}
    optim = optimizer()
    whole = train(optim, scheduler(optim, style, **wsd), 130)
    first = optimizer()
    stopped = scheduler(first, style, **wsd)
    before = train(first, stopped, stop)
    second = optimizer()
    resumed = scheduler(second, style, **wsd, use_checkpoint_lr_scheduler=False)
    resumed.load_state_dict(stopped.state_dict())
    assert before + train(second, resumed, 130 - stop) == whole
    third = optimizer()
    assert train(third, scheduler(third, style, **wsd, last_iter=stop), 130 - stop) == whole[stop:]


OVERRIDES = {"use_checkpoint_lr_scheduler": False, "override_lr_scheduler": True}


@pytest.mark.parametrize(
    ("flags", "used"), [({}, schedule("WSD")), (OVERRIDES, schedule("linear", end_iter=1000))], ids=["file", "flags"]
)
def test_the_checkpoint_wins_unless_the_command_line_overrides(flags: dict[str, bool], used: LRSchedule):
    state = scheduler(optimizer(), "WSD", wsd_decay_iters=30, last_iter=100).state_dict()
    optim = optimizer()
    sched = scheduler(optim, "linear", total_iters=1000, **flags)
    sched.load_state_dict(state)
    assert sched.schedule == used and sched.num_iters == 100
    assert [group["lr"] for group in optim.param_groups] == [used.learning_rate(100)] * 2
    with pytest.raises(ConfigError, match="--use-checkpoint-lr-scheduler and --override-lr-scheduler"):
        scheduler(optim, override_lr_scheduler=True)
    with pytest.raises(ConfigError, match=r"got no optimizer \(None\)"):
        scheduler(None)


def test_with_neither_every_difference_is_named_and_nothing_changes():
    state = scheduler(optimizer(), last_iter=100).state_dict()
    optim = optimizer()
    sched = scheduler(optim, "linear", min_lr=0.0, use_checkpoint_lr_scheduler=False)
    with pytest.raises(CheckpointError) as caught:
        sched.load_state_dict(state)
    style, minimum = caught.value.messages
    assert "decay_style is linear on the command line but cosine in the checkpoint" in style
    assert "min_lr is 0.0 on the command line but 2e-05 in the checkpoint" in minimum
    assert "--override-lr-scheduler or --use-checkpoint-lr-scheduler" in style
    assert (sched.num_iters, optim.param_groups[0]["lr"]) == (0, PEAK / 20)


def test_a_broken_state_is_a_checkpoint_error():
    state = scheduler(optimizer()).state_dict()
    with pytest.raises(CheckpointError, match="schedule is broken: --lr-decay-style sine is unknown"):
        scheduler(optimizer()).load_state_dict(state | {"decay_style": "sine"})
    del state["num_iters"], state["min_lr"]
    with pytest.raises(CheckpointError, match="schedule lacks num_iters, min_lr"):
        scheduler(optimizer()).load_state_dict(state)


def original(style: str, peak: float, floor: float, warmup: float, end: int, n: int) -> float:
    """The rate of the step after ``n`` in Megatron-LM v1.1.5."""
    i = min(n, end - warmup)
    if warmup > 0 and n <= warmup:
        return peak * i / warmup
    i = i - warmup
    if style == "linear":
        rate = peak * (end - i) / end
    elif style == "cosine":
        rate = peak / 2.0 * (math.cos(math.pi * i / end) + 1)
    elif style == "exponential":
        rate = peak * math.exp(-0.693 * i / end)
    else:
        rate = peak
    return max(rate, floor)


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "constant"])
@pytest.mark.parametrize(
    ("peak", "floor", "warmup", "end"),
    [(0.2, 0.011, 10, 100), (1.5e-4, 1e-5, 0.01 * 1250, 1250), (1.5e-4, 1.4e-4, 0, 37), (3e-3, 0.0, 80, 100)],
)
def test_a_classic_schedule_has_the_originals_numbers_to_the_bit(
    style: str, peak: float, floor: float, warmup: float, end: int
) -> None:
    expected = [original(style, peak, floor, warmup, end, n) for n in range(end + 30)]
    values = {"start_lr": peak, "min_lr": floor, "warmup_iter": warmup, "total_iters": end, "classic": True}
    optim = optimizer()
    first = scheduler(optim, style, **values)
    rates = train(optim, first, 30)
    state = first.state_dict()
    assert state.pop("classic") is True  # without it the state is the original's, and the flag decides
    assert state.keys() == {"start_lr", "warmup_iter", "num_iters", "decay_style", "end_iter", "min_lr"}
    optim = optimizer()
    resumed = scheduler(optim, style, **values, use_checkpoint_lr_scheduler=False)
    resumed.load_state_dict(state)
    assert rates + train(optim, resumed, end) == expected


def test_a_classic_schedule_is_no_other() -> None:
    state = scheduler(optimizer(), classic=True).state_dict()
    with pytest.raises(CheckpointError, match="classic is False on the command line but True in the checkpoint"):
        scheduler(optimizer(), use_checkpoint_lr_scheduler=False).load_state_dict(state)
    with pytest.raises(ConfigError, match="--classic-lr-decay has no --lr-decay-style WSD"):
        scheduler(optimizer(), "WSD", classic=True, wsd_decay_iters=1)
    with pytest.raises(ConfigError, match="--classic-lr-decay counts iterations"):
        scheduler(optimizer(), classic=True, position=lambda n: 8 * n)


def test_a_step_may_be_longer() -> None:
    optim = optimizer()
    sched = scheduler(optim)
    sched.step(increment=7)
    sched.step()
    assert (sched.num_iters, optim.param_groups[0]["lr"]) == (8, schedule("cosine").learning_rate(8))
    sched.step(50)
    assert (sched.num_iters, optim.param_groups[1]["lr"]) == (50, schedule("cosine").learning_rate(50))
