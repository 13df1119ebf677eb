"""Estimated time of an iteration: compute, pipeline bubble, and communication over the links of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from operator import attrgetter

from megatron.config import ParallelConfig, RunConfig
from megatron.model.partition import Stage
from megatron.model.spec import architecture_of, fp8_weights
from megatron.parallel import steps_within
from megatron.parallel.pipeline.schedule import Schedule, schedule_of
from megatron.parallel.pipeline.simulation import PassSeconds, bubble_ratio, idle_seconds
from megatron.tools.planning.activations import heads, hidden_bytes, sizes
from megatron.tools.planning.machine import Machine
from megatron.tools.planning.memory import Memory
from megatron.tools.planning.states import FP32, bytes_of, bytes_of_sums, owners


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one iteration, by kind of parallelism."""

    tensor: float
    pipeline: float
    data: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.tensor + self.pipeline + self.data + self.experts


def traffic(run: RunConfig, stage: Stage, memory: Memory) -> Traffic:
    """What a rank of ``stage`` with the parameters of ``memory`` sends in one iteration."""
    reduced = data(run, memory.parameters, memory.trained)
    return Traffic(tensor(run, stage), pipeline(run, stage), reduced, dispatched(run, stage))


def tensor(run: RunConfig, stage: Stage) -> float:
    """All-reduces of hidden states: two per layer forward and two backward, two more where layers are recomputed.

    With sequence parallelism each is a gather and a reduce-scatter, which send as much, and inputs are gathered again.
    Ulysses exchanges query, key, value and context around attention, forward and backward.
    """
    parallel, layers, hidden = run.parallel, stage.num_blocks, _hidden_bytes(run)
    t, parts = parallel.model_parallel_size, parallel.ulysses_size
    passes = 6 if run.activation.layers_together else 4
    reduced = (passes * layers + stage.has_embedding + stage.has_head) * ring_all_reduce(hidden, t)
    exchanged = 2 * passes * layers * ring_gather(hidden / t, parts)  # 4 hidden states in each of passes / 2
    visited = layers * _visiting(run)
    return run.train.gradient_accumulation_steps * (reduced + exchanged + visited) + gathered_again(run, stage)


def _visiting(run: RunConfig) -> float:
    """What a ring sends for a layer: keys and values, once more where attention is recomputed, and their gradients.

    Passed around, they reach the ranks that attend to them, forward and backward, and their gradients, in fp32, follow
    them and return. With a window, steps that bring no rank a key that it attends to are left out; documents may fill
    the sequence. Gathered, every rank receives the keys and values of all ranks.
    """
    model, parallel, ring = run.model, run.parallel, run.parallel.ring_size
    if ring == 1:
        return 0.0
    of_rank = heads(run, sizes(run))[1] // ring
    passes = 3 if run.activation.layers_together or model.recomputes_attention else 2
    if parallel.cp_comm_type == "all_gather":
        return of_rank * (ring - 1) * (passes * bytes_of(run) + FP32)
    causal, chunk = architecture_of(model).is_causal, run.data.seq_length // (2 * ring)
    steps = steps_within(ring, -(-model.pre_tokens // chunk) if causal else 2 * ring, causal)
    returning = len(steps) if len(steps) > 1 else 0
    return of_rank * (passes * (len(steps) - 1) * bytes_of(run) + returning * FP32)


def gathered_again(run: RunConfig, stage: Stage) -> float:
    """Shards of the sequence that the backward pass gathers again: two inputs per layer, and the input of the logits.

    A part of ``tensor`` that is not waited for: gradients are computed at the same time (arXiv 2205.05198, section
    4.2.2).
    """
    if not run.parallel.sequence_parallel:
        return 0.0
    inputs = run.train.gradient_accumulation_steps * (2 * stage.num_blocks + stage.has_head)
    return inputs * ring_gather(_hidden_bytes(run), run.parallel.model_parallel_size)


def _hidden_bytes(run: RunConfig) -> int:
    """Bytes of the hidden states of a micro-batch in the model's type, of a rank's part of the sequence."""
    tokens = run.train.micro_batch_size * run.data.seq_length // run.parallel.sequence_ranks
    return tokens * run.model.hidden_size * bytes_of(run)


def pipeline(run: RunConfig, stage: Stage) -> float:
    """Hidden states forward and their gradients backward, at each boundary."""
    parallel = run.parallel
    if parallel.pipe_stages == 1:
        return 0.0
    last = run.model.num_layers + 1
    borders = sum((chunk.start > 0) + (chunk.stop <= last) for chunk in stage.chunks)
    return run.train.gradient_accumulation_steps * borders * hidden_bytes(run, sizes(run))


def data(run: RunConfig, parameters: int, trained: int) -> float:
    """Gradients reduced and weights gathered, by ZeRO stage (arXiv 1910.02054, section 7).

    ZeRO 2 and 3 reduce the gradients of every micro-batch unless the reduction is coalesced, and ZeRO 3 gathers the
    weights twice for each, too; only ZeRO 3 gathers weights that are not ``trained``.
    """
    ranks, accumulated = owners(run), run.train.gradient_accumulation_steps
    reductions = 1 if run.coalesces_grad_reduction else accumulated
    stage, element = run.zero.zero_stage, bytes_of(run)
    if stage in (1, 2):
        return ring_gather(((reductions if stage == 2 else 1) * bytes_of_sums(run) + element) * trained, ranks)
    moved = reductions * trained + 2 * accumulated * parameters if stage == 3 else 2 * trained
    return ring_gather(moved * element, ranks)


def dispatched(run: RunConfig, stage: Stage) -> float:
    """Tokens sent to the ranks of their experts and back, forward and backward, and once more where recomputed."""
    if run.parallel.expert_model_parallel_size == 1:
        return 0.0
    layers = sum(count for layer, count in stage.counts if any(weight.is_expert for weight in layer.parameters))
    passes = 6 if run.activation.layers_together else 4
    sent = ring_gather(run.model.moe_router_topk * _hidden_bytes(run), run.parallel.expert_model_parallel_size)
    return run.train.gradient_accumulation_steps * passes * layers * sent


_SMALL = 2.0e5
"""Elements of a rank's hidden states, tokens x its columns, at which matmuls reach half the rate of large ones."""
_CORE = 0.5
"""Rate of the attention core relative to linear layers."""


@dataclass(frozen=True)
class Timing:
    """An iteration, in seconds."""

    compute: float
    """Of the busiest stage."""
    tensor: float
    """Waiting for tensor-parallel ranks."""
    pipeline: float
    """Sending between stages."""
    bubble: float
    """Waiting for the pipeline to fill and to drain."""
    data: float
    """Reducing gradients and gathering weights."""
    experts: float
    """Sending tokens to their experts and back; not in ``shares`` without expert parallelism."""
    passes: PassSeconds
    """Of a micro-batch on the busiest stage; not in the total."""

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of each part of the total, by name."""
        names = ("compute", "tensor", "pipeline", "bubble", "data", *(("experts",) if self.experts else ()))
        return {name: getattr(self, name) for name in names}

    @cached_property
    def total(self) -> float:
        """All of it."""
        return sum(self.shares.values())


def timing(run: RunConfig, machine: Machine, stages: Sequence[tuple[Stage, Traffic]]) -> Timing:
    """The time of an iteration of ``run``, from its distinct ``stages``."""
    parallel, span = run.parallel, spans(run.parallel)
    busiest = max((pass_seconds(run, machine, stage) for stage, _ in stages), key=attrgetter("total"))
    compute = run.train.gradient_accumulation_steps * busiest.total
    waited = max(traffic.tensor - gathered_again(run, stage) for stage, traffic in stages)
    tensor = waited / machine.bandwidth(span["tensor"]) if span["tensor"] > 1 else 0.0
    sends = max(traffic.pipeline for _, traffic in stages) / machine.bandwidth(span["pipeline"])
    data = max(traffic.data for _, traffic in stages) / machine.bandwidth(span["data"])
    if not parallel.uses_pipeline and run.zero.zero_overlap_comm:
        data = max(data - compute / 2, 0.0)
    experts = max(traffic.experts for _, traffic in stages) / machine.bandwidth(span["experts"])
    idle = idle_ratio(schedule_of(run), busiest) * (compute + tensor + sends + experts)
    return Timing(compute, tensor, sends, idle, data, experts, busiest)


def spans(parallel: ParallelConfig) -> dict[str, int]:
    """For each kind of traffic: ranks of one group are numbered less than this far apart."""
    inner = parallel.model_parallel_size * parallel.sequence_ranks
    replicas = inner * parallel.data_parallel_size
    experts = inner * parallel.expert_model_parallel_size
    return {"tensor": inner, "pipeline": replicas * parallel.pipe_stages, "data": replicas, "experts": experts}


def pass_seconds(run: RunConfig, machine: Machine, stage: Stage) -> PassSeconds:
    """Compute time of a micro-batch on a rank of ``stage``; the gradients of inputs with what is recomputed for them.

    The attention core has no weights, and its gradients take twice as long as its forward pass.
    """
    tokens = run.train.micro_batch_size * run.data.seq_length
    core = sum(count * layer.attention_flops(run.data.seq_length) for layer, count in stage.counts) / _CORE
    linears = sum(count * layer.matmul_flops for layer, count in stage.counts)
    in_blocks = sum(count * layer.matmul_flops for layer, count in stage.counts if layer.is_block)
    frozen = sum(count * layer.frozen_flops for layer, count in stage.counts)
    again = bool(run.activation.layers_together)
    core_again = core if again or run.model.recomputes_attention else 0
    per_rank = tokens / (run.parallel.model_parallel_size * run.parallel.sequence_ranks)
    size = per_rank * run.model.hidden_size
    speed = machine.device.flops(run.precision.dtype) * machine.device.efficiency * size / (size + _SMALL)
    repeated = sum(count * layer.repeated_flops for layer, count in stage.counts)
    saved = _saved_in_fp8(run, machine, stage)
    inputs = linears - saved + repeated + 2 * core + again * (in_blocks - saved) + core_again
    flops = (linears - saved + core, inputs, max(linears - frozen, 0))
    return PassSeconds(*(per_rank * one / speed for one in flops))


_ROWWISE = 0.8
"""Rate of FP8 with a scale for each row relative to one for each tensor (from torchao's gains for Llama 8B)."""


def _saved_in_fp8(run: RunConfig, machine: Machine, stage: Stage) -> float:
    """FLOPs per token that FP8 saves in a forward pass, and again in the gradients of inputs, as those of 16 bits."""
    rate = machine.device.fp8_speedup * (_ROWWISE if run.model.fp8_recipe == "rowwise" else 1.0)
    t = run.parallel.model_parallel_size
    weights = sum(count * weight.numel for layer, count in stage.counts for weight in fp8_weights(run.model, layer, t))
    return 2 * weights * (1 - 1 / rate) if machine.device.fp8_speedup > 1 else 0.0


_MOST_STAGES = 8
"""Stages that are simulated; the bubble of more is taken to grow like theirs."""


def idle_ratio(schedule: Schedule, seconds: PassSeconds) -> float:
    """Idle time over useful time of a pipeline all of whose stages take ``seconds`` for the passes of a micro-batch."""
    stages, micro_batches = schedule.stages, schedule.micro_batches
    if stages == 1 or schedule.name == "1f1b" or (schedule.name == "interleaved" and micro_batches % stages == 0):
        return bubble_ratio(stages, micro_batches, schedule.chunks)
    inputs, weights = (round(one / seconds.forward, 1) for one in (seconds.inputs, seconds.weights))
    return _idle_ratio(schedule, PassSeconds(1.0, inputs, weights))


@lru_cache(maxsize=4096)
def _idle_ratio(schedule: Schedule, seconds: PassSeconds) -> float:
    """The same from a simulation."""
    stages, micro_batches, simulated = schedule.stages, schedule.micro_batches, schedule
    if schedule.name != "interleaved":  # more than two micro-batches for each stage do not change the idle time
        fewer = min(stages, _MOST_STAGES)
        of_fewer = ceil(fewer * min(micro_batches / stages, 2))
        simulated = replace(schedule, stages=fewer, micro_batches=of_fewer)
    idle = _idle_passes(simulated, seconds) * (stages - 1) / (simulated.stages - 1)
    return idle / (micro_batches * schedule.chunks * seconds.total)


_idle_passes = lru_cache(maxsize=4096)(idle_seconds)


def ring_all_reduce(n: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of ``n`` bytes."""
    return 2 * (ranks - 1) / ranks * n


def ring_gather(n: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-gather or reduce-scatter of ``n`` bytes."""
    return (ranks - 1) / ranks * n
