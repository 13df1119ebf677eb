"""fp16's dynamic loss scale: DeepSpeed's own scaler, made from the config that our flags compile to."""

import pytest
from support.command_lines import CUDA, parse


@pytest.fixture
def scales(run_ranks):
    """The loss scale before each step and after the last; a ``!`` is a step that overflows."""

    def follow(words: str, steps: str) -> list[float]:
        (found,) = run_ranks(1, follow_scale, dict(parse(f"--fp16 {words}", environ=CUDA).ds_config), steps)
        return found

    return follow


def follow_scale(ds_config: dict, steps: str) -> list[float]:
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    from megatron.engines.engine import loss_scale_limit_reported

    fp16 = DeepSpeedConfig(ds_config).float16_config
    assert fp16.enabled
    # As DeepSpeedEngine gives them to ZeRO's optimizers.
    scaler = CreateLossScaler(torch.half, fp16.loss_scale, fp16.loss_scale == 0, fp16.dynamic_loss_scale_args())
    found = [scaler.loss_scale]
    with loss_scale_limit_reported():
        for step in steps:
            scaler.update_scale(step == "!")
            found.append(scaler.loss_scale)
    return found


def test_scale_starts_at_the_initial_scale(scales) -> None:
    assert scales("", "") == [2.0**16]
    assert scales("--initial-loss-scale 4096", "") == [4096]


def test_static_scale_is_constant(scales) -> None:
    assert scales("--loss-scale 128", "!.!") == [128] * 4


def test_scale_doubles_after_each_window_without_overflow(scales) -> None:
    assert scales("--loss-scale-window 3 --initial-loss-scale 4", "......") == [4, 4, 4, 4, 8, 8, 8]
    assert scales("--loss-scale-window 2 --initial-loss-scale 4", "......") == [4, 4, 4, 8, 8, 16, 16]


def test_overflow_halves_the_scale_and_restarts_the_window(scales) -> None:
    words = "--loss-scale-window 3 --initial-loss-scale 8 --hysteresis 1"
    assert scales(words, "..!....") == [8, 8, 8, 4, 4, 4, 4, 8]


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_is_the_overflows_before_it_halves(scales, hysteresis: int) -> None:
    found = scales(f"--hysteresis {hysteresis} --initial-loss-scale 16", "!!!!")
    assert found.index(8) == hysteresis
    assert found == [16] * hysteresis + [8, 4, 2, 1][: 5 - hysteresis]


def test_a_whole_window_refills_the_hysteresis(scales) -> None:
    words = "--hysteresis 2 --loss-scale-window 2 --initial-loss-scale 16"
    assert scales(words, "!...!!") == [16, 16, 16, 16, 32, 32, 16]


def test_overflow_at_the_minimum_scale_is_an_error(scales) -> None:
    words = "--min-scale 4 --initial-loss-scale 16 --hysteresis 1"
    assert scales(words, "!!") == [16, 8, 4]
    with pytest.raises(
        AssertionError,
        match="NumericsError: gradients overflow even at the smallest loss scale, --min-scale: lower --lr",
    ):
        scales(words, "!!!")
