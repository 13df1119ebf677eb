"""Where the host waits for a GPU in an iteration: a fixed list, of one rank of a larger run with fake tensors."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from support.emulated_cuda import EmulatedCuda

UNLOGGED, LOGGED = 2, 3
"""Iterations after the first, in which buffers are made and DeepSpeed records the order of layers."""
MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data"
    f" --vocab-size 512 --batch-size 2 --gas 2 --train-iters {LOGGED} --log-interval {LOGGED} --eval-iters 0"
    " --num-workers 0 --lr 1e-3"
).split()

READ = "megatron/engines/status.py read"
"""The one of the project, in a logged iteration: its numbers, and whether the step was skipped."""
NORM_IS_VALID = "deepspeed/runtime/utils.py:233 is_invalid_grad_norm"
"""Whether the gradient's norm is a number: otherwise the step is skipped."""
NORM_MARK_3 = "deepspeed/runtime/zero/stage3.py:2483 get_grad_norm_direct"
"""The same at ZeRO 3."""
REDUCED_3 = "deepspeed/runtime/zero/stage3.py:1414 independent_gradient_partition_epilogue"
"""ZeRO 3 ends the reduction of gradients after each micro-batch."""
GATHERED_3 = "deepspeed/runtime/zero/partition_parameters.py:2128 _allgather_params_coalesced"
"""ZeRO 3 gathers the small weights, which stay whole, after the step."""

SENT_TO_EXPERTS = "megatron/parallel/expert.py rows_of_ranks"
"""How many tokens go to which rank of expert parallelism: once in a layer and pass."""

LONG = "--seq-length 256 --max-position-embeddings 256"
VARLEN = f"--zero-stage 1 --reset-attention-mask --attention-dropout 0 {LONG}"
EXPERTS = "--num-experts 4 --swiglu --disable-bias-linear --moe-aux-loss-coeff 0.01"
EP = "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16"
PP = "--pipe-parallel-size 2 --num-layers 2"
CAPACITY = "--moe-expert-capacity-factor 1.5"
ZERO_3 = {REDUCED_3: 2, NORM_MARK_3: 2, NORM_IS_VALID: 1, GATHERED_3: 1}


class Rank(NamedTuple):
    """A rank of a layout, and how often its host may wait in an iteration."""

    flags: str
    world_size: int
    rank: int
    allowed: dict[str, int]


FP8 = "--fp8-format e4m3 --fp8-recipe rowwise --fp8-min-size 16"
RANKS = {
    "ZeRO 0, EP 2, all tokens gathered, SGD": Rank(
        f"{EXPERTS} {EP} --moe-token-dispatcher-type allgather --optimizer sgd", 2, 1, {}
    ),
    "ZeRO 1, fp16, ring, documents": Rank(
        "--zero-stage 1 --fp16 --context-parallel-size 2 --reset-attention-mask", 2, 1, {}
    ),
    "ZeRO 1, rowwise FP8, sums in fp32, documents by varlen, recomputed": Rank(
        f"{VARLEN} --checkpoint-activations --grad-accum-dtype fp32 {FP8}", 2, 1, {}
    ),
    "ZeRO 1, documents in blocks, experts with a capacity, Lion": Rank(
        f"--zero-stage 1 --reset-attention-mask {LONG} {EXPERTS} {CAPACITY} --optimizer lion", 2, 1, {}
    ),
    "ZeRO 2, TP 2, sequence parallel, FP8": Rank(
        "--zero-stage 2 --model-parallel-size 2 --sequence-parallel --fp8-format hybrid --fp8-min-size 16", 4, 3, {}
    ),
    "ZeRO 3, Ulysses": Rank("--zero-stage 3 --ds-sequence-parallel-size 2", 4, 3, ZERO_3),
    "ZeRO 1, EP 2": Rank(f"--zero-stage 1 {EXPERTS} {EP}", 4, 3, {SENT_TO_EXPERTS: 2}),
    "ZeRO 1, EP 2, a capacity filled up": Rank(
        f"--zero-stage 1 {EXPERTS} {EP} {CAPACITY} --moe-pad-expert-input-to-capacity", 4, 3, {}
    ),
    "PP 2, first stage, documents by varlen, Muon": Rank(f"{VARLEN} {PP} --optimizer muon", 4, 1, {}),
    "PP 3, second stage, interleaved, documents by varlen": Rank(
        f"{VARLEN} --pipe-parallel-size 3 --num-layers 6 --num-layers-per-virtual-pipeline-stage 1 --gas 3", 3, 1, {}
    ),
    "PP 2, last stage, ring, documents": Rank(
        f"--zero-stage 1 {PP} --context-parallel-size 2 --reset-attention-mask", 4, 3, {}
    ),
    "PP 2, TP 2, last stage, documents by varlen, sums in fp32": Rank(
        f"{VARLEN} {PP} --grad-accum-dtype fp32 --model-parallel-size 2 --sequence-parallel", 4, 3, {}
    ),
}


@pytest.mark.parametrize("layout", RANKS)
def test_the_host_waits_where_the_list_says(emulated_cuda: EmulatedCuda, tmp_path: Path, layout: str) -> None:
    flags, world_size, rank, allowed = RANKS[layout]
    dtype = [] if "--fp16" in flags else ["--bf16"]
    program = (
        "tests/support/emulated_cuda/waits.py",
        tmp_path / "found",
        str(world_size),
        str(rank),
        "pretrain_gpt2.py",
    )
    emulated_cuda.run(1, *program, *MODEL, *flags.split(), *dtype).ok()
    found: list[dict[str, int]] = json.loads((tmp_path / "found").read_text())
    assert any("planted: loss.item()" in place for place in not_allowed(found[1], allowed)), "it was not found"
    assert not not_allowed(found[UNLOGGED], allowed)
    assert not not_allowed(found[LOGGED], allowed | {READ: 2})
    places = {named(place): times for place, times in found[LOGGED].items()}
    assert places == allowed | {READ: places[READ]}, "remove from the list what no longer waits"


def test_the_host_knows_the_padding_of_bert(emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """On a stage with both ends of the model, whose second half gets segment ids from the other stage."""
    program = "tests/support/emulated_cuda/waits.py", tmp_path / "found", "2", "0", "pretrain_bert.py"
    flags = f"{PP} --num-layers 4 --pipeline-schedule zbv --bf16 --zero-stage 1 --attention-dropout 0 {LONG}"
    emulated_cuda.run(1, *program, *MODEL, *flags.split()).ok()
    assert not json.loads((tmp_path / "found").read_text())[UNLOGGED]


def not_allowed(found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """The lines that wait more often than ``allowed``, as ``FILE:LINE FUNCTION: SOURCE``."""
    return [place for place, times in found.items() if times > allowed.get(named(place), 0)]


def named(place: str) -> str:
    """As the list has it: with the line for DeepSpeed, whose version is fixed."""
    location, function, _ = (*place.split(" ", 2), "")[:3]
    return f"{location if place.startswith('deepspeed/') else location.partition(':')[0]} {function.removesuffix(':')}"
