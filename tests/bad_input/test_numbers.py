"""Numbers are written in ASCII digits, and schedules, partitions and windows are those of a run."""

import pytest
from support.command_lines import CPU, SMALL, complaints

from megatron.cli import parse_run
from megatron.common.errors import ConfigError
from megatron.tools.command_line import ToolParser


@pytest.mark.parametrize("text", ["١٢", "１２", "1_0", "+3", " 3", "3 ", "0x10", "1e", "∞", "nan", ""])  # noqa: RUF001
def test_only_digits_make_a_number(text: str) -> None:
    for flag in ("--train-iters", "--lr", "--seed"):
        with pytest.raises(ConfigError, match=flag):
            parse_run([*SMALL.split(), f"{flag}={text}"], CPU)
    parser = ToolParser("")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--share", type=float)
    for flag in ("--rank", "--share"):
        with pytest.raises(ConfigError):
            parser.parse_args([flag, text])


@pytest.mark.parametrize(
    "words",
    [
        "--batch-size 1 --global-batch-size 1000000001 --rampup-batch-size 1 1 100",
        "--step-batch-size-schedule 0:4,1e300:8",
        "--step-batch-size-schedule 0:4,100000:1e300",
        "--step-batch-size-schedule 0:4,100000:4",
        "--pipe-parallel-size 1 --pipeline-partition ٢",
        "--pre-tokens ((5",
        "--trace out --trace-steps ١:٢",
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(words: str) -> None:
    flag = words.split()[-4 if "ramp" in words else -2]
    assert any(line.startswith(flag) and "needs" not in line for line in complaints(words))
