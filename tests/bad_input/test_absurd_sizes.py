"""Sizes that no computer holds, and times that no run lasts, are refused by arithmetic, before anything is built.

Numbers are written in ASCII digits.
"""

import json
import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import CPU, SMALL, complaints, parse, read
from support.evaluating import load_tool

from megatron.cli import parse_run
from megatron.common.environment import check_place
from megatron.common.errors import ConfigError, ResourceError, UserError
from megatron.config import RunConfig
from megatron.tokenizer import build_tokenizer
from megatron.tools.command_line import ToolParser
from megatron.tools.planning.request import bytes_of_text
from megatron.tools.rehearsal.rehearse import ranks_of_text
from megatron.tools.verify.request import parse_layout
from megatron.training.preflight import _check_outputs, _check_sizes


def test_a_size_or_a_time_beyond_all_computers_is_refused() -> None:
    for words in ("--train-iters 1e12", "--hidden-size 1e9", "--num-layers 1e15", "--watchdog-minutes 1e300"):
        (line,) = complaints(words)
        assert line.startswith(f"{words} must be ") and line.endswith(" at most")
    assert complaints("--watchdog-minutes 1e-9") == ["--watchdog-minutes 1e-9 must be 0.01 or more"]


def sized(words: str) -> RunConfig:
    run = parse(words)
    return replace(run, model=replace(run.model, vocab_size=100, padded_vocab_size=128))


@pytest.mark.parametrize(
    "words, what",
    [
        ("--batch-size 1e6 --seq-length 1e6", "the hidden states of one layer "),
        ("t5 --batch-size 1e6 --decoder-seq-length 1e6", "the hidden states of one layer "),
        ("--num-layers 10000 --hidden-size 100000", "the weights of one rank "),
    ],
)
def test_what_the_memory_cannot_hold_is_refused(words: str, what: str) -> None:
    with pytest.raises(ResourceError) as caught:
        _check_sizes(sized(words))
    assert caught.value.exit_code == 7 and caught.value.messages[0].startswith(what)
    # Index maps are built an epoch at a time: see tests/data/test_gpt2_dataset.py.
    for long in ("--train-iters 1e10 --batch-size 1000", "--eval-iters 1e7 --eval-interval 1 --train-iters 1e7"):
        _check_sizes(sized(long))


def test_monitors_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.training.preflight.find_spec", lambda name: None if name == "wandb" else name)
    (path := tmp_path / "ds.json").write_text('{"wandb": {"enabled": true}}')
    with pytest.raises(ConfigError, match="wandb.enabled true needs wandb, which is not installed: "):
        _check_outputs(parse(f"--deepspeed_config {path}"))
    for names, expected in (
        ({"output_path": "/dev/null/logs"}, "/dev/null/logs/DeepSpeedJobName: /dev/null is not a folder"),
        ({"output_path": "", "job_name": ""}, "is empty: name a folder"),
    ):
        path.write_text(json.dumps({"csv_monitor": {"enabled": True, **names}}))
        with pytest.raises(ConfigError, match=f"csv_monitor.output_path {expected}"):
            _check_outputs(parse(f"--deepspeed_config {path}"))
    in_one_folder = dict.fromkeys(("csv_monitor", "tensorboard"), {"enabled": True, "output_path": str(tmp_path)})
    path.write_text(json.dumps(in_one_folder))
    _check_outputs(parse(f"--deepspeed_config {path} --tensorboard-dir {tmp_path}/DeepSpeedJobName"))


def test_outputs_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    with pytest.raises(ConfigError, match=f"--metrics-file {fifo} is no file"):
        _check_outputs(parse(f"--metrics-file {fifo}"))
    for key in ("output_path", "job_name"):
        (path := tmp_path / "ds.json").write_text(json.dumps({"csv_monitor": {"enabled": True, key: "a\0"}}))
        with pytest.raises(ConfigError, match="csv_monitor.output_path .*: embedded null byte"):
            _check_outputs(parse(f"--deepspeed_config {path}"))


def test_a_warmup_of_less_than_one_iteration_is_announced() -> None:
    assert read("--warmup 0.01 --train-iters 60").warnings == [
        "--warmup 0.01 of 60 iterations is less than one: there is no warm-up"
    ]
    assert read("--warmup 0 --train-iters 60").warnings == read("--train-iters 60").warnings == []


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


OTHER_READERS: list[Callable[[str], object]] = [
    lambda digit: load_tool("plot_metrics").named_losses([f"a={digit}"]),
    lambda digit: load_tool("_conversion").shard_size(Namespace(max_shard_size=f"{digit}GB")),
    lambda digit: load_tool("_conversion").shard_size(Namespace(max_shard_size=f"1{digit}")),
    lambda digit: bytes_of_text(f"{digit}GB"),
    lambda digit: bytes_of_text(f"1{digit}B"),
    lambda digit: ranks_of_text(digit, None),
    lambda digit: parse_layout(f"tp{digit}-pp0-dp1"),
    lambda digit: check_place({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MASTER_PORT": digit}),
    lambda digit: build_tokenizer("NullTokenizer", None, None, vocab_size=9).tokenize(digit),
]


@pytest.mark.parametrize("digit", ["１", "١", "\N{KELVIN SIGN}", "9" * 5000])  # noqa: RUF001
@pytest.mark.parametrize("reader", OTHER_READERS)
def test_only_digits_make_a_number_within_a_value(reader: Callable[[str], Any], digit: str) -> None:
    """Nor is the sign of Kelvin a K."""
    with pytest.raises((UserError, ArgumentTypeError)):
        list(reader(digit))


@pytest.mark.parametrize(
    "words",
    [
        "--batch-size 1 --global-batch-size 1000000001 --rampup-batch-size 1 1 100",
        "--step-batch-size-schedule 0:4,1e300:8",
        "--step-batch-size-schedule 0:4,100000:4",
        "--pipe-parallel-size 1 --pipeline-partition ٢",
        "--pre-tokens ((5",
        "--trace out --trace-steps ١:٢",
        "--dry-run --world-size 2 --rank ١",
        "--dry-run --world-size 20 --rank 1_0",
        "--moe-layer-freq [1]*0x2",
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(words: str) -> None:
    flag = words.split()[-4 if "ramp" in words else -2]
    assert any(line.startswith(flag) and "needs" not in line for line in complaints(words))
