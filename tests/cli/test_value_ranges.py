"""Checks of single values: required ones that are missing, and those out of range."""

import pytest
from support.command_lines import CPU, complaints

from megatron.cli import parse_run
from megatron.common.errors import ConfigError


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


def test_messages_about_ranges() -> None:
    assert complaints("--hidden-dropout 1") == ["--hidden-dropout 1 must be from 0 to 1, 1 excluded"]
    assert complaints("--batch-size 0") == ["--batch-size 0 must be 1 or more"]
    assert complaints("--zero-stage 4") == ["--zero-stage 4 must be from 0 to 3"]
    assert complaints("--layernorm-epsilon 0") == ["--layernorm-epsilon 0 must be more than 0"]
