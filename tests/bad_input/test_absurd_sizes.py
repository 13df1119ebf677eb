"""Sizes that no computer holds, and times that no run lasts, are refused by arithmetic, before anything is built."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_lines import complaints, parse, read

from megatron.checkpoint.compatibility import overridden_settings
from megatron.checkpoint.run_file import SavedRun, describe
from megatron.common.environment import check_place
from megatron.common.errors import ConfigError, ResourceError
from megatron.config import RunConfig
from megatron.training.preflight import _check_outputs, _check_sizes


@pytest.mark.parametrize(
    "words",
    [
        "--train-iters 1e12", "--batch-size 1e12", "--gas 1e9", "--eval-iters 1e12", "--num-layers 1e15",
        "--hidden-size 1e9", "--num-workers 5000", "--seq-length 1e12", "--num-attention-heads 1e15",
        "--model-parallel-size 1e15", "--pipe-parallel-size 1e15", "--watchdog-minutes 1e300",
        "--distributed-timeout-minutes 1e9", "--distributed-timeout-minutes 1e300",
    ],
)  # fmt: skip
def test_a_size_beyond_all_computers_is_refused(words: str) -> None:
    (line,) = complaints(words)
    assert line.startswith(f"{words} must be ") and line.endswith(" at most")


@pytest.mark.parametrize("flag", ["--watchdog-minutes", "--distributed-timeout-minutes"])
def test_a_time_limit_within_which_nothing_can_report_is_refused(flag: str) -> None:
    assert complaints(f"{flag} 1e-9") == [f"{flag} 1e-9 must be 0.01 or more"]


def sized(words: str) -> RunConfig:
    run = parse(words)
    return replace(run, model=replace(run.model, vocab_size=100, padded_vocab_size=128))


@pytest.mark.parametrize(
    "words, what",
    [
        ("--batch-size 1e6 --seq-length 1e6", "the hidden states of one layer "),
        ("--num-layers 10000 --hidden-size 100000", "the weights of one rank "),
    ],
)
def test_what_the_memory_cannot_hold_is_refused(words: str, what: str) -> None:
    with pytest.raises(ResourceError) as caught:
        _check_sizes(sized(words))
    assert caught.value.exit_code == 7 and caught.value.messages[0].startswith(what)
    _check_sizes(sized(""))


@pytest.mark.parametrize(
    "words", ["--train-iters 1e10 --batch-size 1000", "--eval-iters 1e7 --eval-interval 1 --train-iters 1e7"]
)
def test_the_length_of_a_run_takes_no_memory(words: str) -> None:
    """Index maps are built an epoch at a time: see tests/data/test_windows.py."""
    _check_sizes(sized(words))


def test_monitors_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.cli.deepspeed_json.find_spec", lambda name: None)
    (path := tmp_path / "ds.json").write_text('{"wandb": {"enabled": true}}')
    (line,) = complaints(f"--deepspeed_config {path}")
    assert line.startswith("wandb.enabled true needs wandb, which is not installed: ")
    path.write_text(json.dumps({"csv_monitor": {"enabled": True, "output_path": "/dev/null/logs"}}))
    with pytest.raises(ConfigError, match="csv_monitor.output_path /dev/null/logs: /dev/null is not a folder"):
        _check_outputs(parse(f"--deepspeed_config {path}"))


def test_a_local_rank_beyond_the_last_is_refused() -> None:
    environ = {"RANK": "0", "LOCAL_RANK": "5", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match="the environment sets local rank 5 of 1 on this host, counted from 0"):
        check_place(environ)


def test_a_longer_schedule_says_what_it_follows_from(tmp_path: Path) -> None:
    saved = SavedRun(tmp_path, "global_step6", describe(parse("--train-iters 60 --warmup 0.1"), 6))
    decay, warmup = overridden_settings(saved, parse("--train-iters 80 --warmup 0.1"))
    assert decay == (
        f"--lr-decay-iters is 80, but 60 in {saved.path} (by default that of --train-iters; --lr-decay-iters 60 keeps "
        "the old value)"
    )
    assert "--warmup is a fraction of the decay; --lr-warmup-iters 6 keeps" in warmup
    assert overridden_settings(saved, parse("--train-iters 80 --warmup 0.1 --lr-decay-iters 60")) == []


def test_a_warmup_of_less_than_one_iteration_is_announced() -> None:
    assert read("--warmup 0.01 --train-iters 60").warnings == [
        "--warmup 0.01 of 60 iterations is less than one: there is no warm-up"
    ]
    assert read("--warmup 0 --train-iters 60").warnings == read("--train-iters 60").warnings == []
