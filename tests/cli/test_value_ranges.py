"""Checks of single values: required ones that are missing, and those out of range."""

import pytest
from support.command_lines import CPU, CUDA, complaints

from megatron.cli import parse_run
from megatron.common.errors import ConfigError
from megatron.config import flag_fields
from megatron.config.fields import ends, inside


def test_missing_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run([], CPU)
    assert {message.split()[0] for message in caught.value.messages} == {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--lr",
        "--train-iters",
        "--batch-size",
        "--data-path",
        "--vocab-file",
        "--merge-file",
    }


@pytest.mark.parametrize("name", [name for name, field in flag_fields().items() if field.metadata["flag"]["within"]])
def test_values_out_of_range_are_refused(name: str) -> None:
    field = flag_fields()[name]
    interval = field.metadata["flag"]["within"]
    low, high = ends(interval)
    outside = low - 1 if interval[0] == "[" else low
    flag = "--" + (field.metadata["flag"]["name"] or name).replace("_", "-")
    environ = {**CUDA, "LOCAL_RANK": "0"}
    metadata = field.metadata["flag"]
    program = "bert" if metadata["masked_lm"] else "t5" if metadata["encoder_decoder"] == "only" else ""
    assert any(
        message.startswith(f"{flag} {outside:g} must be ")
        for message in complaints(f"{program} {flag} {outside:g}".strip(), environ=environ)
    )
    if interval.endswith(")") and high < float("inf"):
        assert not inside(high, interval) and inside((low + high) / 2, interval)


def test_messages_about_ranges() -> None:
    assert complaints("--hidden-dropout 1") == ["--hidden-dropout 1 must be from 0 to 1, 1 excluded"]
    assert complaints("--zero-stage 4") == ["--zero-stage 4 must be from 0 to 3"]
    assert complaints("--layernorm-epsilon 0") == ["--layernorm-epsilon 0 must be more than 0"]
