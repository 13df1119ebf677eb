"""Estimated times, held to published rates; traffic, held to the papers' volumes; and bubbles."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import MagicMock

import formulas
import pytest
import torch
from support.command_lines import parse

from megatron.config import RunConfig
from megatron.model.partition import plan
from megatron.ops.partial_attention import PartialAttention
from megatron.parallel import sequence
from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, in_flight, simulate
from megatron.parallel.sequence.ring_attention import RingAttention
from megatron.tools.planning.compute import core_seconds, pass_seconds, waves
from megatron.tools.planning.machine import DEVICES, TERA, Machine
from megatron.tools.planning.request import make_request
from megatron.tools.planning.schedule_costs import idle_seconds
from megatron.tools.planning.search import Candidate, search
from megatron.tools.planning.timing import pipeline
from megatron.tools.planning.timing import sequence as sequence_traffic

# arXiv 2104.04473, table 1: heads, hidden, layers, TP, PP, micro-batch, GPUs, batch, TFLOP/s of a GPU.
WEAK_SCALING = [
    (24, 2304, 24, 1, 1, 16, 32, 512, 137),
    (32, 3072, 30, 2, 1, 16, 64, 512, 138),
    (64, 8192, 48, 8, 2, 4, 512, 1536, 138),
    (96, 12288, 80, 8, 8, 2, 1536, 2304, 148),
    (160, 25600, 128, 8, 64, 1, 3072, 3072, 163),
]


def candidate(words: str, devices: int, **settings) -> Candidate:
    """The one layout that the words leave."""
    request = make_request(words.split(), Machine(DEVICES["a100"], 8), devices, **settings)
    found, cut = search(request), "--sequence-parallel" in words
    layouts = (*found.fitting, *found.superseded, *found.too_large)
    (one,) = (one for one in layouts if one.run.parallel.sequence_parallel is cut)
    return one


@pytest.mark.parametrize("row", WEAK_SCALING, ids=lambda row: f"{row[6]} GPUs")
def test_published_rates_are_estimated_within_a_sixth(row):
    """Attention kept its scores then."""
    heads, hidden, layers, t, p, micro, gpus, batch, teraflops = row
    one = candidate(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048 "
        f"--global-batch-size {batch} --batch-size {micro} --model-parallel-size {t} --pipe-parallel-size {p} "
        "--zero-stage 1 --checkpoint-activations --attention-softmax-in-fp32",
        gpus,
        vocab_size=51200,
    )
    done = formulas.full_recompute_flops(batch, 2048, layers, hidden, 51200)
    assert done / one.timing.total / gpus / TERA == pytest.approx(teraflops, rel=1 / 6)


# arXiv 2104.04473, table 2: heads, hidden, layers, micro-batch, GPUs, TFLOP/s of a GPU, at ZeRO 3 alone.
ZERO_3 = [(96, 12288, 96, 4, 384, 144), (96, 12288, 96, 1, 1536, 44), (128, 20480, 105, 2, 1120, 98)]


@pytest.mark.parametrize("row", ZERO_3, ids=lambda row: f"{row[4]} GPUs")
def test_published_rates_at_zero_3_are_estimated_within_a_quarter(row):
    heads, hidden, layers, micro, gpus, teraflops = row
    one = candidate(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048 "
        f"--global-batch-size {micro * gpus} --batch-size {micro} --model-parallel-size 1 --pipe-parallel-size 0 "
        "--zero-stage 3 --checkpoint-activations --attention-softmax-in-fp32",
        gpus,
        vocab_size=51200,
    )
    done = formulas.full_recompute_flops(micro * gpus, 2048, layers, hidden, 51200)
    assert done / one.timing.total / gpus / TERA == pytest.approx(teraflops, rel=0.25)


BASE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --global-batch-size 32 --batch-size 2"
LAYER = 2 * 256 * 512 * 2  # bytes of hidden states of a micro-batch in 16-bit


SELECTIVE = "--zero-stage 1 --recompute-granularity selective"


@pytest.mark.parametrize(
    ("words", "all_reduces", "gathers", "meanwhile"),
    [
        (f"--model-parallel-size 4 {SELECTIVE}", 4 * 8 + 2, 0, 2 * 8),
        ("--model-parallel-size 4 --zero-stage 1 --recompute-granularity full", 6 * 8 + 2, 0, 2 * 8),
        (f"--model-parallel-size 4 --sequence-parallel {SELECTIVE}", 4 * 8 + 2, 2 * 8 + 1, 8),
        (f"--model-parallel-size 4 --tp-comm-overlap {SELECTIVE}", 4 * 8 + 2, 0, 2 * 8 + 2 * 8 * 3 / 4),
    ],
)
def test_traffic_of_tensor_parallelism(words, all_reduces, gathers, meanwhile):
    """Four all-reduces a layer and micro-batch, six with recomputation, and one at each end (arXiv 2104.04473, 3.2).

    The sequence gathered and scattered takes as much. In the backward pass the two inputs of a layer and that of the
    logits are gathered again, while products are computed (arXiv 2205.05198, section 4.2.2), and the gradients of the
    two inputs are summed while those of weights are; of four chunks in the forward pass only one is waited for.
    """
    one = candidate(f"{BASE} --pipe-parallel-size 0 {words}", 4)
    sent, waited = (count * 16 * 2 * 3 / 4 * LAYER for count in (all_reduces, all_reduces - meanwhile))
    assert one.traffic.tensor == pytest.approx(sent + gathers * 16 * 3 / 4 * LAYER)
    assert one.timing.tensor == pytest.approx(waited / Machine(DEVICES["a100"], 8).bandwidth(4))


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("--num-query-groups 2 --checkpoint-activations", 4),
        ("--pre-tokens 3 --recompute-granularity selective", 4),
        ("--pre-tokens 9 --cp-comm-type all_gather", 4),
        ("bert", 4),
    ],
)
def test_traffic_of_a_ring_is_what_it_sends(monkeypatch, words: str, size: int) -> None:
    """Of a layer, forward and backward: in a window, without the steps that bring no rank a key that it sees."""
    run = parse(f"{words} --context-parallel-size {size}", ranks=size)
    sent: list[float] = []

    def pass_on(x: torch.Tensor, group: object, distance: int) -> Callable[[], torch.Tensor]:
        sent.append(x.nbytes)
        return lambda: x

    def gather(x: torch.Tensor, group: object) -> torch.Tensor:
        sent.append(x.nbytes * (size - 1))
        return torch.stack([x] * size)

    monkeypatch.setattr(sequence, "_pass_on", pass_on)
    monkeypatch.setattr(sequence, "_gather", gather)
    monkeypatch.setattr(
        sequence.dist, "reduce_scatter_tensor", lambda own, parts, group: sent.append(own.nbytes * (size - 1))
    )
    shape = run.train.micro_batch_size, run.data.seq_length // size, run.model.head_size
    query, key, value = (
        torch.ones(shape[0], heads, *shape[1:], requires_grad=True)
        for heads in (run.model.num_attention_heads, *[run.model.query_groups] * 2)
    )
    attention = RingAttention(
        MagicMock(**{"rank.return_value": 1, "size.return_value": size}),
        run.parallel.cp_comm_type == "all_gather",
        causal=not words.startswith("bert"),
        window=run.model.pre_tokens,
        kernel=PartialAttention(fused=True),
    )
    if "checkpoint" in words or "recompute" in words:
        attention(query.detach(), key.detach(), value.detach())
    attention(query, key, value).sum().backward()
    stage = plan(run)[0]
    assert sequence_traffic(run, stage) == run.train.gradient_accumulation_steps * stage.num_blocks * sum(sent)


def test_traffic_of_experts():
    """Each token to its 2 experts and back, forward and backward, of 4 experts in half of the layers; 3 of 4 leave."""
    words = f"{BASE} --num-experts 4 --moe-layer-freq 2 --model-parallel-size 1 --pipe-parallel-size 0 {SELECTIVE}"
    one, alone = (candidate(f"{words} --expert-model-parallel-size {size}", 4) for size in (4, 1))
    assert (one.traffic.experts, alone.traffic.experts) == (pytest.approx(4 * 4 * 4 * 2 * LAYER * 3 / 4), 0)
    assert one.timing.experts == pytest.approx(one.traffic.experts / Machine(DEVICES["a100"], 8).bandwidth(4))
    assert "experts" not in alone.timing.shares and one.timing.shares["experts"] == one.timing.experts
    assert 0 < one.traffic.data < alone.traffic.data, "experts without copies are not reduced"
    found = search(make_request(words.split(), Machine(DEVICES["a100"], 8), 4))
    assert {c.run.parallel.expert_model_parallel_size for c in found.fitting} == {1, 2, 4}


@pytest.mark.parametrize(("t", "sequence", "sent"), [(1, "", 1.0), (2, "", 1.0), (2, "--sequence-parallel", 0.5)])
def test_traffic_between_stages(t, sequence, sent):
    """A middle stage sends each micro-batch forward and its gradient backward; of a sequence a rank its part."""
    one = candidate(f"{BASE} --pipe-parallel-size 4 --model-parallel-size {t} {sequence} {SELECTIVE}", 4 * t)
    first, middle, *_ = (pipeline(one.run, stage) for stage in plan(one.run))
    assert (first, middle) == pytest.approx((16 * sent * LAYER, 2 * 16 * sent * LAYER))


COALESCED = "--zero-coalesce-grad-reduction"


@pytest.mark.parametrize(
    ("words", "ways"),
    [("0", 2), ("1", 2), ("2", 4 + 1), ("3", 3 * 4), (f"2 {COALESCED}", 2), (f"3 {COALESCED}", 1 + 2 * 4)],
)
def test_traffic_of_weights_and_gradients(words, ways):
    """What ZeRO's section 7 counts, with four micro-batches; a ring of four passes on three quarters."""
    precision = "fp32" if words == "0" else "bf16"
    one = candidate(
        f"{BASE} --model-parallel-size 1 --pipe-parallel-size 0 --recompute-granularity full --zero-stage {words}",
        4,
        precision=precision,
    )
    count = one.memory.parameters
    assert one.traffic.data == pytest.approx(ways * 0.75 * count * (4 if words == "0" else 2))


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2), ("dualpipev", 2)]
)
def test_the_bubble_of_many_micro_batches_is_that_of_few(name: str, chunks: int) -> None:
    """A schedule with fewer micro-batches has the same idle time, and as many passes in flight."""
    for stages in (2, 4, 5):
        whole = Schedule(name, stages, 10 * stages, chunks)
        short, seconds = whole.shortened, PassSeconds(1.0, 1.25, 0.75)
        assert short.micro_batches == 3 * stages
        idle = max(one.end for one in simulate(whole, seconds)) - whole.micro_batches * chunks * seconds.total
        assert idle_seconds(short, seconds) == idle_seconds(whole, seconds) == pytest.approx(idle)
        assert [in_flight(whole, stage) for stage in range(stages)] == [
            in_flight(short, stage) for stage in range(stages)
        ]


def test_the_bubble_of_an_iteration() -> None:
    """1F1B's is (p - 1) / m of the useful time; DualPipeV leaves half of that or more."""
    sizes = BASE.replace("--hidden-size 512", "--hidden-size 4096").replace("--seq-length 256", "--seq-length 4096")
    words = f"{sizes} --model-parallel-size 1 --pipe-parallel-size 4 {SELECTIVE}"
    plain, folded = candidate(words, 4), candidate(f"{words} --pipeline-schedule dualpipev", 4)
    assert plain.timing.bubble == pytest.approx(3 / 16 * plain.timing.compute)
    assert 0.5 <= folded.timing.bubble / plain.timing.bubble < 0.8


def test_fp8_saves_time_where_the_device_has_it():
    """Less than the published gains for Llama 8B of 25 and 10 %, since gradients of weights stay in bf16."""
    words = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 14336"
        " --swiglu --seq-length 8192 --batch-size 1 --bf16 --zero-stage 1"
    )
    run, faster = (replace_vocabulary(parse(f"{words} {more}", ranks=8)) for more in ("", "--fp8-format hybrid"))
    rowwise = replace(faster, model=replace(faster.model, fp8_recipe="rowwise"))

    def seconds(one: RunConfig, device: str) -> float:
        return pass_seconds(one, Machine(DEVICES[device], 8), plan(one)[0]).total

    assert 1.05 < seconds(run, "h100") / seconds(faster, "h100") < 1.25
    assert 1.0 < seconds(run, "h100") / seconds(rowwise, "h100") < 1.1
    assert seconds(run, "a100") == seconds(faster, "a100")


@pytest.mark.parametrize(
    ("rows", "columns", "processors", "longer"),
    [
        (1792, 1792, 108, 108 / 98),  # the guide's example: 7 x 14 tiles are a wave,
        (1793, 1793, 108, 2 * 108 * 128 * 256 / 1793**2),  # 8 x 15 are two
        (128 * 108, 256, 108, 1.0),
        (128 * 109, 256, 108, 2 * 108 / 109),  # one tile more takes a second wave
        (128 * 108 + 1, 256, 108, 2 * 108 * 128 / (128 * 108 + 1)),
        (512, 4096, 132, 132 / 64),  # gradients of an output projection at TP 8: 4 x 16 tiles
        (4096, 512, 132, 132 / 64),
        (4096, 1792, 132, 2 * 132 / 224),
        (98304, 4096, 132, 94 * 132 / 12288),
        (1, 1, 0, 1.0),
    ],
)
def test_tiles_are_computed_in_full_waves(rows: int, columns: int, processors: int, longer: float) -> None:
    assert waves(rows, columns, processors) == pytest.approx(longer)


def test_a_part_of_a_small_model_takes_longer_than_its_share() -> None:
    """Matmuls of Llama 8B of a rank of 8: tiles in full waves, and writing results of few inputs.

    The gradient of query, key and value takes 132 / 96 of the time of its FLOPs, that of the output projection 132 / 64
    and those of the MLP 4 x 132 / 448 and 2 x 132 / 224.
    """
    words = (
        "--num-layers 1 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 14336"
        " --swiglu --disable-bias-linear --seq-length 8192 --batch-size 12 --bf16 --zero-stage 1 --model-parallel-size"
    )
    machine = Machine(DEVICES["h100"]._replace(efficiency=1.0, touched=0.0), 8)
    run = replace_vocabulary(parse(f"{words} 8", ranks=8))
    block = next(stage for stage in plan(run) if stage.num_blocks)
    (layer,) = (layer for layer, _ in block.counts if layer.is_block)
    only = MagicMock(counts=[(layer, 1)], num_blocks=1)
    tokens, peak, memory = 12 * 8192, machine.device.peak_flops, machine.device.memory_bandwidth
    matmuls = [(768, 4096, 132 / 96), (4096, 512, 132 / 64), (3584, 4096, 4 * 132 / 448), (4096, 1792, 2 * 132 / 224)]
    seconds = pass_seconds(run, machine, only)
    weights = sum(2 * tokens * n * k * longer / peak for n, k, longer in matmuls)
    assert seconds.weights == pytest.approx(weights, rel=0.005), "starting kernels takes 0.4 %"
    computed = sum(2 * tokens * n * k * waves(tokens, n, 132) / peak for n, k, _ in matmuls)
    forward = seconds.forward - core_seconds(run, machine, only)
    assert forward == pytest.approx(computed + sum(2 * tokens * n / memory for n, *_ in matmuls), rel=0.005)
    apart = Machine(machine.device._replace(joined=False), 8)
    assert pass_seconds(run, apart, only).weights > 1.1 * seconds.weights


def test_attention_to_other_ranks_takes_as_much_longer_as_stated() -> None:
    words = "--num-layers 1 --hidden-size 1024 --num-attention-heads 8 --seq-length 32768 --context-parallel-size 4"
    run = parse(f"{words} --bf16", ranks=4)
    stage = plan(run)[0]
    device = DEVICES["h100"]
    near, far = (core_seconds(run, Machine(device._replace(remote=r), 8), stage) for r in (1.0, 2.0))
    assert far == pytest.approx(near * (1 + 3 * 2) / 4)


def replace_vocabulary(run: RunConfig) -> RunConfig:
    return replace(run, model=replace(run.model, vocab_size=128256, padded_vocab_size=128256))
