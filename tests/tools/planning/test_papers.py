"""The planner's numbers for a run equal those that the papers publish, and their formulas."""

from dataclasses import replace

import formulas
import pytest
from support.command_lines import CUDA, parse

from megatron.config import RunConfig
from megatron.model.partition import plan
from megatron.model.spec import hardware_flops, model_flops
from megatron.tools.planning.activations import activations
from megatron.tools.planning.memory import deferred_bytes, stage_memory
from megatron.tools.planning.states import Weight, Weights, states
from megatron.tools.planning.timing import traffic

GPT3 = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --batch-size 1 --bf16"


def run_of(words: str, ranks: int = 8, vocabulary: int = 51200) -> RunConfig:
    run = parse(words, ranks=ranks, environ=CUDA)
    return replace(run, model=replace(run.model, vocab_size=vocabulary, padded_vocab_size=vocabulary))


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_states_are_those_of_zero(stage, gigabytes):
    """7.5 billion parameters on 64 owners, of which each has whole tensors (arXiv 1910.02054, table 1)."""
    weights = Weights([[Weight(7_500_000_000 // 640, True)] * 640])
    held = states(run_of(f"--bf16 --zero-stage {stage}", ranks=64), weights)
    assert held.weights + held.gradients + held.optimizer == pytest.approx(gigabytes * 1e9, abs=0.06e9)


@pytest.mark.parametrize(("t", "stage"), [(1, 1), (2, 2), (2, 3)])
def test_quantized_weights_are_kept_twice_except_at_zero_3(t, stage):
    """Two bytes for each weight of 96 layers' 12 h^2; FP8 also needs memory for what is quantized."""
    words = f"{GPT3} --zero-stage {stage} --model-parallel-size {t}"
    bf16, fp8 = (stage_memory(run_of(f"{words} {more}"))[0] for more in ("", "--fp8-format hybrid"))
    assert fp8.states.weights - bf16.states.weights == (2 * 96 * 12 * 12288**2 // t if stage < 3 else 0)
    assert fp8.working.activations - bf16.working.activations == 3 * 2048 * 4 * 12288 // t


@pytest.mark.parametrize(
    ("heads", "hidden", "batch", "mebibytes"),
    [(64, 6144, 4, (624, 204, 96)), (160, 25600, 1, (650, 212.5, 100))],
    ids=["22B", "1T"],
)
def test_activations_of_a_layer_equal_the_paper(heads, hidden, batch, mebibytes):
    """Of 8 tensor-parallel ranks: with selective recomputation, also of a cut sequence, and with full recomputation
    (arXiv 2205.05198, table 4). Attention keeps no scores here, as with selective recomputation there.

    But for numbers of four bytes: mean and deviation of the norms, and one of each row of attention.
    """
    words = f"--hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048 --batch-size {batch} --bf16"
    plain, cut, full = (
        run_of(f"{words} --zero-stage 1 --model-parallel-size 8 {more}")
        for more in ("", "--sequence-parallel", "--checkpoint-activations")
    )
    of_rows = 4 * batch * 2048 * heads // 8
    small = [4 * batch * 4 * 2048 + of_rows, 4 * batch * 4 * 2048 // 8 + of_rows, 0]
    kept = activations(plain).layer, activations(cut).layer, activations(full).kept_input
    assert list(kept) == [size * 2**20 + more for size, more in zip(mebibytes, small, strict=True)]


@pytest.mark.parametrize("words", ["", "--cp-comm-type a2a", "--ds-sequence-parallel-size 2"])
def test_context_parallelism_shards_all_activations(words):
    """Each rank keeps its part of the tokens of everything, and of a ring's attention nothing beyond that."""
    whole, split = (run_of(f"{GPT3} --zero-stage 1 {more}") for more in ("", f"--context-parallel-size 4 {words}"))
    ranks = split.parallel.sequence_ranks
    assert activations(split).layer * ranks == activations(whole).layer
    assert activations(split).hidden * ranks == activations(whole).hidden
    assert activations(split).logits * ranks <= 1.1 * activations(whole).logits
    sent = traffic(split, plan(split)[0], stage_memory(split)[0])
    keys = 96 * 2 * 12288 * 2048 // ranks * 2  # bytes of all layers' keys and values in bf16, of a rank's tokens
    ring = split.parallel.ring_size
    of_ulysses = 4 * keys * (1 - 1 / split.parallel.ulysses_size)  # query, key, value, context; forward and backward
    of_ring = keys * (2 * (ring - 1) + 2 * ring) if ring > 1 else 0  # twice around, and gradients in fp32
    assert sent.sequence == pytest.approx(split.train.gradient_accumulation_steps * (of_ulysses + of_ring))


def test_a_stage_keeps_the_activations_of_the_micro_batches_under_way():
    """The first stage those of all layers, however many stages there are (arXiv 2205.05198, section 4.2.3)."""
    run = run_of(f"{GPT3} --zero-stage 1 --pipe-parallel-size 8 --gas 16")
    memories = stage_memory(run)
    assert [memory.working.in_flight for memory in memories] == [8, 7, 6, 5, 4, 3, 2, 1]
    layer = activations(run).layer
    assert memories[0].working.activations == pytest.approx(96 * layer, rel=0.05)
    assert memories[4].working.activations - memories[5].working.activations == 12 * layer


def test_weight_gradients_of_experts_are_deferred() -> None:
    """Each of a layer's 2 x 2048 rows of experts has h + 4h elements for each of two matrices."""
    words = f"{GPT3} --zero-stage 1 --pipe-parallel-size 8 --gas 16 --pipeline-schedule zbh1 --num-experts 4"
    run = run_of(words)
    products = deferred_bytes(run, plan(run)[0].counts)
    of_others = 2048 * 12288 * (1 + 1 + 3 + 1 + 1)  # a gradient of hidden states; QKV and attention's output matrix
    of_experts = 2 * 2048 * 12288 * 2 * 5
    assert products == 12 * 2 * (of_others + of_experts)


def test_operations_are_those_of_the_paper():
    """23 days for 300 billion tokens on 1,536 GPUs at 141 TFLOP/s each (arXiv 2104.04473, table 2)."""
    run = run_of(f"{GPT3} --zero-stage 1 --checkpoint-activations")
    sizes = (8, 2048, 96, 12288, 51200)
    assert hardware_flops(run) == pytest.approx(formulas.full_recompute_flops(*sizes))
    assert 300e9 / (8 * 2048) * hardware_flops(run) / (1536 * 141e12) / 86400 == pytest.approx(23, abs=1)
    plain = run_of(f"{GPT3} --zero-stage 1")
    assert (
        hardware_flops(plain) == model_flops(plain) == model_flops(run) == pytest.approx(formulas.model_flops(*sizes))
    )
