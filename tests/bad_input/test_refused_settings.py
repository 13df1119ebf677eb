"""Errors of the command line and the environment: one line each, before torch is imported."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.programs import Programs
from support.refusals import PREFIX, launched, refusal

TWO = launched(0, 2)

# Problem: flags, environment, and what each line says.
SETTINGS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "a split in other digits": ("--split 1_0,1", {}, ['--split "1_0,1": expected one to three weights']),
    "four parts of the data": ("--split 1,1,1,1", {}, ['--split "1,1,1,1": expected one to three weights']),
    "a rank beyond the last": (
        "",
        {**TWO, "RANK": "2"},
        ["the environment sets rank 2 of 2 processes, counted from 0"],
    ),
    "a local rank beyond the last": ("", {**launched(0, 1), "LOCAL_RANK": "5"}, ["local rank 5 of 1 on this host"]),
    "a world without a rank": ("", {"WORLD_SIZE": "2"}, ["2 processes, but not the rank of this one (RANK)"]),
    "a rank without an address": (
        "",
        {"RANK": "0", "WORLD_SIZE": "1"},
        ["without LOCAL_RANK, MASTER_ADDR, MASTER_PORT"],
    ),
    "a port that is no number": (
        "",
        {**TWO, "MASTER_PORT": "http"},
        ["MASTER_PORT=http: set a whole number from 1 on"],
    ),
    "a port that there is not": ("", {**TWO, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536: ports end at 65535"]),
    "a timeout that is no number": ("", {"DEEPSPEED_TIMEOUT": "x"}, ["DEEPSPEED_TIMEOUT=x: set a whole number from 1"]),
    "a device that there is not": ("", {"DS_ACCELERATOR": "gpu"}, ["DS_ACCELERATOR=gpu: choose from cuda, cpu, xpu"]),
    "all at once": (
        "--hidden-size 33 --zero-stage 3 --pipe-parallel-size 3 --fp16 --adam-beta1 1 --checkpoint-activations "
        "--checkpoint-in-cpu --tok-k 3",
        TWO,
        [
            "unknown flag --tok-k: see --help",
            "--adam-beta1 1 must be from 0 to 1, 1 excluded",
            "--hidden-size 33 is not a multiple of --num-attention-heads 4: use 32 or 36",
            "2 processes cannot be split into --model-parallel-size 1 x --pipe-parallel-size 3: use 3 processes",
            "--zero-stage 3 cannot be combined with --pipe-parallel-size 3",
            "--fp16 needs CUDA, and this run is on cpu: remove it",
            "--checkpoint-in-cpu needs --partition-activations: add it, or remove --checkpoint-in-cpu",
        ],
    ),
}
if find_spec("apex") is None:
    SETTINGS["apex that is not there"] = (
        "--fused-kernels apex",
        {"DS_ACCELERATOR": "cuda"},
        ["--fused-kernels apex: apex is not installed; install it, or use auto or torch"],
    )


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_is_refused(place: Path, case: str) -> None:
    words, environ, parts = SETTINGS[case]
    code, lines = refusal(place, words, environ)
    assert code == 2 and all(part in line for part, line in zip(parts, lines, strict=True)), lines


def test_first_rank_of_each_host_reports_errors(place: Path) -> None:
    words = "--hidden-size 33"
    (line,) = refusal(place, words, launched(0, 2))[1]
    assert refusal(place, words, launched(1, 2)) == (2, [])
    assert refusal(place, words, {**launched(1, 2), "LOCAL_RANK": "0"}) == (2, [f"rank 1: {line}"])


def test_errors_are_printed_once(programs: Programs) -> None:
    ended = programs.pretrain(2, "--batch-size", "2", "--train-iters", "1", "--model-parallel-size", "4")
    printed = [line for line in ended.output.splitlines() if line.startswith(PREFIX)]
    assert printed == [
        f"{PREFIX}2 processes cannot be split into --model-parallel-size 4: use 4 processes, or "
        "--model-parallel-size 1 or 2"
    ]
    assert ended.returncode == 2
