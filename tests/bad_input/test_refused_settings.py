"""Errors of the command line and the environment: one line each, before torch is imported."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.programs import Programs
from support.refusals import PREFIX, launched, refusal

TWO = launched(0, 2)

# Problem: flags, environment, and the expected lines.
SETTINGS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "heads do not divide the hidden size": (
        "--hidden-size 33",
        {},
        ["--hidden-size 33 is not a multiple of --num-attention-heads 4: use 32 or 36"],
    ),
    "tensor-parallel ranks do not divide the heads": (
        "--model-parallel-size 2 --num-attention-heads 1",
        TWO,
        ["--num-attention-heads 1 is not a multiple of --model-parallel-size 2: use 2"],
    ),
    "fewer layers than stages": (
        "--pipe-parallel-size 2 --num-layers 1",
        TWO,
        ["--num-layers 1 is less than --pipe-parallel-size 2: use at most 1 stage"],
    ),
    "processes do not make a grid": (
        "--model-parallel-size 2 --pipe-parallel-size 2",
        launched(0, 6),
        [
            "6 processes cannot be split into --model-parallel-size 2 x --pipe-parallel-size 2: use 4 or 8 processes, "
            "or --model-parallel-size 1, or --pipe-parallel-size 1 or 3"
        ],
    ),
    "one process for two tensor-parallel ranks": (
        "--model-parallel-size 2",
        {},
        ["1 process cannot be split into --model-parallel-size 2: use 2 processes, or --model-parallel-size 1"],
    ),
    "batch sizes that contradict each other": (
        "--global-batch-size 16 --gas 3",
        TWO,
        [
            "--global-batch-size 16 is not --batch-size 2 x --gas 3 x data-parallel size 2 = 12: "
            "set a global batch of 12 or an accumulation of 4"
        ],
    ),
    "a batch that the replicas cannot share": (
        "--global-batch-size 6",
        TWO,
        [
            "--global-batch-size 6 is not a multiple of --batch-size 2 x data-parallel size 2 = 4: "
            "set a global batch of 4 or 8"
        ],
    ),
    "activations in CPU memory that are not partitioned": (
        "--checkpoint-activations --checkpoint-in-cpu",
        {},
        ["--checkpoint-in-cpu needs --partition-activations: add it, or remove --checkpoint-in-cpu"],
    ),
    "ZeRO 2 under a pipeline": (
        "--pipe-parallel-size 1 --zero-stage 2",
        {},
        [
            "--zero-stage 2 cannot be combined with --pipe-parallel-size 1: the pipeline accumulates gradients over "
            "micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0 (docs/parallelism.md, ZeRO 2 with a pipeline, compares their memory)"
        ],
    ),
    "fp16 on the CPU": ("--fp16", {}, ["--fp16 does not work on the CPU: use --bf16, or neither for fp32"]),
    "fp16 and bf16": (
        "--fp16 --bf16",
        {"DS_ACCELERATOR": "cuda"},
        ["--fp16 and --bf16 exclude each other: weights have one type; remove one"],
    ),
    "apex on the CPU": (
        "--fused-kernels apex",
        {},
        ["--fused-kernels apex needs CUDA, and this run is on cpu: remove it"],
    ),
    "more tokens than positions": (
        "--seq-length 1024",
        {},
        [
            "--seq-length 1024 is more than --max-position-embeddings 32: raise --max-position-embeddings, "
            "or lower --seq-length"
        ],
    ),
    "a misspelt flag": ("--hiden-size 32", {}, ["unknown flag --hiden-size: did you mean --hidden-size?"]),
    "an argument of another program": (
        "--top-k 5",
        {},
        ["--top-k: it is for text generation: use tools/generate.py"],
    ),
    "a value after a switch": ("--bf16 true", {}, ["unexpected argument 'true': every value follows its flag"]),
    "a value tied to a switch": ("--bf16=true", {}, ["unexpected argument 'true': every value follows its flag"]),
    "a flag without its value": ("--lr", {}, ["--lr: needs a value"]),
    "a word for a number": ("--batch-size two", {}, ["--batch-size two: must be a number"]),
    "half an iteration": ("--train-iters 1.5", {}, ["--train-iters 1.5: must be a whole number"]),
    "no number": ("--lr nan", {}, ["--lr nan: must be a finite number"]),
    "negative": ("--batch-size -1", {}, ["--batch-size -1 must be 1 or more"]),
    "zero": ("--exit-interval 0", {}, ["--exit-interval 0 must be 1 or more"]),
    "huge": ("--hidden-size 1e300", {}, ["--hidden-size 1e300: must be 9007199254740992 at most"]),
    "four parts of the data": (
        "--split 1,1,1,1",
        {},
        ['--split "1,1,1,1": expected one to three weights for training, validation and test, such as "969, 30, 1"'],
    ),
    "an empty name": ("--save ''", {}, ["--save '': must not be empty"]),
    "an empty name of the config": ("--deepspeed_config ''", {}, ["--deepspeed-config '': must not be empty"]),
    "two units": (
        "--train-samples 8",
        {},
        ["--train-iters 4 and --train-samples 8 exclude each other: give one"],
    ),
    "two names that differ": (
        "--micro-batch-size 4",
        {},
        ["--batch-size 2 and --micro-batch-size 4 set the same thing: remove one"],
    ),
    "a rank that is no number": (
        "",
        {**TWO, "RANK": "abc"},
        ["environment variable RANK=abc: set a whole number from 0 on, or unset it"],
    ),
    "a rank beyond the last": (
        "",
        {**TWO, "RANK": "2"},
        ["the environment sets rank 2 of 2 processes, counted from 0: start with deepspeed, torchrun or mpirun"],
    ),
    "a world without a rank": (
        "",
        {"WORLD_SIZE": "2"},
        [
            "the environment sets 2 processes, but not the rank of this one (RANK): start with deepspeed, "
            "torchrun or mpirun, or unset WORLD_SIZE"
        ],
    ),
    "a rank without an address": (
        "",
        {"RANK": "0", "WORLD_SIZE": "1"},
        [
            "the environment has RANK without LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start with deepspeed, torchrun or "
            "mpirun, or unset RANK"
        ],
    ),
    "no world": (
        "",
        {"WORLD_SIZE": "0"},
        ["environment variable WORLD_SIZE=0: set a whole number from 1 on, or unset it"],
    ),
    "a port that is no number": (
        "",
        {**TWO, "MASTER_PORT": "http"},
        ["environment variable MASTER_PORT=http: set a whole number from 1 on, or unset it"],
    ),
    "a port that there is not": (
        "",
        {**TWO, "MASTER_PORT": "65536"},
        ["environment variable MASTER_PORT=65536: ports end at 65535"],
    ),
    "a device that there is not": (
        "",
        {"DS_ACCELERATOR": "gpu"},
        ["environment variable DS_ACCELERATOR=gpu: choose from cuda, cpu, xpu, npu, mps, hpu, mlu, sdaa, supa, klxpu"],
    ),
    "all at once": (
        "--hidden-size 33 --zero-stage 3 --pipe-parallel-size 3 --fp16 --adam-beta1 1 --checkpoint-activations "
        "--checkpoint-in-cpu --tok-k 3",
        TWO,
        [
            "unknown flag --tok-k: see --help",
            "--adam-beta1 1 must be from 0 to 1, 1 excluded",
            "--hidden-size 33 is not a multiple of --num-attention-heads 4: use 32 or 36",
            "2 processes cannot be split into --model-parallel-size 1 x --pipe-parallel-size 3: use 3 processes, "
            "or --pipe-parallel-size 1 or 2",
            "--zero-stage 3 cannot be combined with --pipe-parallel-size 3: the pipeline accumulates gradients over "
            "micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0 (docs/parallelism.md, ZeRO 2 with a pipeline, compares their memory)",
            "--fp16 does not work on the CPU: use --bf16, or neither for fp32",
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
    words, environ, lines = SETTINGS[case]
    assert refusal(place, words, environ) == (2, lines)


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
