"""Estimated time of an iteration: compute, pipeline bubble, and communication over a machine's links."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from operator import attrgetter

from megatron.config import ParallelConfig, RunConfig
from megatron.model.partition import Stage
from megatron.model.spec import architecture_of
from megatron.parallel import steps_within
from megatron.parallel.pipeline.schedule import Schedule, schedule_of
from megatron.parallel.pipeline.simulation import PassSeconds
from megatron.tools.planning.activations import heads, hidden_bytes, sizes
from megatron.tools.planning.compute import BACKWARD, core_seconds, pass_seconds
from megatron.tools.planning.machine import Machine
from megatron.tools.planning.memory import Memory
from megatron.tools.planning.schedule_costs import bubble_ratio, idle_seconds
from megatron.tools.planning.states import FP32, bytes_of, bytes_of_sums, owners


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends per iteration, by kind of parallelism."""

    tensor: float
    pipeline: float
    data: float
    experts: float = 0.0
    sequence: float = 0.0

    @property
    def total(self) -> float:
        """Total bytes."""
        return self.tensor + self.pipeline + self.data + self.experts + self.sequence


def traffic(run: RunConfig, stage: Stage, memory: Memory) -> Traffic:
    """The traffic of a rank of ``stage`` with the parameters of ``memory``."""
    reduced = data(run, memory.parameters, memory.trained)
    return Traffic(tensor(run, stage), pipeline(run, stage), reduced, dispatched(run, stage), sequence(run, stage))


def tensor(run: RunConfig, stage: Stage) -> float:
    """Bytes of all-reduces of hidden states: two per layer forward and two backward, two more with recomputation.

    With sequence parallelism each is an all-gather and a reduce-scatter of the same size; inputs are gathered again.
    """
    layers, t = stage.num_blocks, run.parallel.model_parallel_size
    passes = 6 if run.activation.layers_together else 4
    reduced = (passes * layers + stage.has_embedding + stage.has_head) * ring_all_reduce(_hidden_bytes(run), t)
    return run.train.gradient_accumulation_steps * reduced + gathered_again(run, stage)


def sequence(run: RunConfig, stage: Stage) -> float:
    """Bytes of context parallelism and Ulysses: keys and values around a ring, or all-to-all of heads.

    Ulysses exchanges query, key, value and context around attention, forward and backward.
    """
    layers, passes = stage.num_blocks, 3 if run.activation.layers_together else 2
    hidden, parts = _hidden_bytes(run) / run.parallel.model_parallel_size, run.parallel.ulysses_size
    exchanged = 4 * passes * ring_gather(hidden, parts)  # 4 hidden states in each of the passes
    return run.train.gradient_accumulation_steps * layers * (exchanged + _ring_bytes(run))


def _ring_bytes(run: RunConfig) -> float:
    """Bytes of ring attention per layer: keys and values, again if attention is recomputed, and their gradients.

    In a ring they visit the ranks that attend to them, forward and backward, and their fp32 gradients follow and
    return. With a window, useless steps are left out; documents may fill the sequence. With all-gather, every rank
    receives the keys and values of all ranks.
    """
    model, parallel, ring = run.model, run.parallel, run.parallel.ring_size
    if ring == 1:
        return 0.0
    local = heads(run, sizes(run))[1] // ring
    passes = 3 if run.activation.layers_together or model.recomputes_attention else 2
    if parallel.cp_comm_type == "all_gather":
        return local * (ring - 1) * (passes * bytes_of(run) + FP32)
    causal, chunk = architecture_of(model).is_causal, run.data.seq_length // (2 * ring)
    steps = steps_within(ring, -(-model.pre_tokens // chunk) if causal else 2 * ring, causal)
    returning = len(steps) if len(steps) > 1 else 0
    return local * (passes * (len(steps) - 1) * bytes_of(run) + returning * FP32)


def gathered_again(run: RunConfig, stage: Stage) -> float:
    """Bytes that the backward pass gathers again with sequence parallelism: two inputs per layer, and the head's input.

    This part of ``tensor`` overlaps with the computation of gradients (arXiv 2205.05198, section 4.2.2).
    """
    if not run.parallel.sequence_parallel:
        return 0.0
    inputs = run.train.gradient_accumulation_steps * (2 * stage.num_blocks + stage.has_head)
    return inputs * ring_gather(_hidden_bytes(run), run.parallel.model_parallel_size)


def summed_meanwhile(run: RunConfig, stage: Stage) -> float:
    """Bytes of input-gradient reductions, the part of ``tensor`` that overlaps with weight gradients."""
    if schedule_of(run).divides_backward or run.model.lora_rank:
        return 0.0
    sums = ring_gather(_hidden_bytes(run), run.parallel.model_parallel_size)
    sums *= 1 if run.parallel.sequence_parallel else 2
    return run.train.gradient_accumulation_steps * 2 * stage.num_blocks * sums


def _hidden_bytes(run: RunConfig) -> int:
    """Bytes of a micro-batch's hidden states in the model's dtype, for a rank's shard of the sequence."""
    tokens = run.train.micro_batch_size * run.data.seq_length // run.parallel.sequence_ranks
    return tokens * run.model.hidden_size * bytes_of(run)


def pipeline(run: RunConfig, stage: Stage) -> float:
    """Bytes between pipeline stages: hidden states forward and their gradients backward, at each chunk boundary."""
    parallel = run.parallel
    if parallel.pipe_stages == 1:
        return 0.0
    last = run.model.num_layers + 1
    borders = sum((chunk.start > 0) + (chunk.stop <= last) for chunk in stage.chunks)
    return run.train.gradient_accumulation_steps * borders * hidden_bytes(run, sizes(run))


def data(run: RunConfig, parameters: int, trained: int) -> float:
    """Bytes of reduced gradients and gathered weights, by ZeRO stage (arXiv 1910.02054, section 7).

    ZeRO 2 and 3 reduce gradients in every micro-batch unless the reduction is coalesced, and ZeRO 3 gathers weights
    twice in each, including weights that are not ``trained``.
    """
    ranks, accumulated = owners(run), run.train.gradient_accumulation_steps
    reductions = 1 if run.coalesces_grad_reduction else accumulated
    stage, element = run.zero.zero_stage, bytes_of(run)
    if stage in (1, 2):
        return ring_gather(((reductions if stage == 2 else 1) * bytes_of_sums(run) + element) * trained, ranks)
    moved = reductions * trained + 2 * accumulated * parameters if stage == 3 else 2 * trained
    return ring_gather(moved * element, ranks)


def dispatched(run: RunConfig, stage: Stage) -> float:
    """Bytes of tokens sent to their experts and back, forward and backward, and again with recomputation."""
    if run.parallel.expert_model_parallel_size == 1:
        return 0.0
    layers = sum(count for layer, count in stage.counts if any(weight.is_expert for weight in layer.parameters))
    passes = 6 if run.activation.layers_together else 4
    sent = ring_gather(run.model.moe_router_topk * _hidden_bytes(run), run.parallel.expert_model_parallel_size)
    return run.train.gradient_accumulation_steps * passes * layers * sent


@dataclass(frozen=True)
class Timing:
    """Time of an iteration by purpose, in seconds, without overlapped communication."""

    compute: float
    """Computation of the busiest stage."""
    tensor: float
    """Communication of tensor parallelism."""
    pipeline: float
    """Transfers between stages."""
    bubble: float
    """Idle time while the pipeline fills and drains."""
    data: float
    """Reduction of gradients and gathering of weights."""
    experts: float
    """Dispatch of tokens to experts and back; not in ``shares`` without expert parallelism."""
    sequence: float
    """Communication of context parallelism and Ulysses; not in ``shares`` without them."""
    passes: PassSeconds
    """Passes of a micro-batch on the busiest stage; not in the total."""

    @property
    def shares(self) -> dict[str, float]:
        """Purpose to seconds, which add up to the total."""
        names = ["compute", "tensor", "pipeline", "bubble", "data"]
        names += [name for name in ("experts", "sequence") if getattr(self, name)]
        return {name: getattr(self, name) for name in names}

    @cached_property
    def total(self) -> float:
        """Total seconds."""
        return sum(self.shares.values())


def timing(run: RunConfig, machine: Machine, stages: Sequence[tuple[Stage, Traffic]]) -> Timing:
    """The time of an iteration of ``run``, from its distinct ``stages``."""
    span, micro_batches = spans(run.parallel), run.train.gradient_accumulation_steps
    busiest = max((pass_seconds(run, machine, stage) for stage, _ in stages), key=attrgetter("total"))
    compute = micro_batches * busiest.total

    def seconds(kind: str, sent: Iterable[float]) -> float:
        return max(sent) / machine.bandwidth(span[kind])

    tensor = max(_waiting_for_sums(run, machine, stage, traffic) for stage, traffic in stages)
    sends = seconds("pipeline", (traffic.pipeline for _, traffic in stages))
    first = hidden_bytes(run, sizes(run)) / machine.bandwidth(span["pipeline"])
    sends = max(
        sends - compute, 2 * (run.parallel.pipe_stages - 1) * first
    )  # only the first and last transfers do not overlap
    experts = seconds("experts", (traffic.experts for _, traffic in stages))
    ring = seconds("sequence", (traffic.sequence for _, traffic in stages))
    if run.parallel.ring_size > 1 and run.parallel.cp_comm_type != "all_gather":  # overlaps with attention
        cores = max(core_seconds(run, machine, stage) for stage, _ in stages)
        ring = max(ring - (1 + BACKWARD) * micro_batches * cores, 0.0)
    data = _waiting_for_data(run, seconds("data", (traffic.data for _, traffic in stages)), busiest)
    idle = idle_ratio(schedule_of(run), busiest) * (compute + tensor + experts + ring)
    return Timing(compute, tensor, sends, idle, data, experts, ring, busiest)


_CHUNKS = 4
"""Chunks of a matmul with ``--tp-comm-overlap``; the communication of all but one is overlapped."""


def _waiting_for_sums(run: RunConfig, machine: Machine, stage: Stage, traffic: Traffic) -> float:
    """Seconds of tensor-parallel communication that do not overlap with matmuls."""
    if run.parallel.model_parallel_size == 1:
        return 0.0
    bandwidth = machine.bandwidth(spans(run.parallel)["tensor"])
    waited = traffic.tensor - gathered_again(run, stage)
    if run.parallel.tp_comm_overlap:
        passes = 2 if run.activation.layers_together else 1
        forward = 2 * passes * stage.num_blocks * ring_all_reduce(_hidden_bytes(run), run.parallel.model_parallel_size)
        waited -= run.train.gradient_accumulation_steps * forward * (1 - 1 / _CHUNKS)
    weight_seconds = run.train.gradient_accumulation_steps * pass_seconds(run, machine, stage).weights
    return waited / bandwidth - min(summed_meanwhile(run, stage) / bandwidth, weight_seconds)


_LEAST_EXPOSED = 0.15
"""Minimum share of ZeRO 3's communication that is not overlapped (arXiv 2104.04473, table 2)."""


def _waiting_for_data(run: RunConfig, seconds: float, passes: PassSeconds) -> float:
    """The part of the ``seconds`` of data-parallel communication that does not overlap with computation.

    At ZeRO 1 gradients are reduced during the last backward pass, at ZeRO 2 during each one, and weights are gathered
    during the first forward pass. ZeRO 3 does both during all passes, with a minimum that is not overlapped.
    """
    micro_batches = run.train.gradient_accumulation_steps
    if run.zero.zero_stage == 3 and run.zero.zero_overlap_comm is not False:
        return max(seconds - micro_batches * passes.total, _LEAST_EXPOSED * seconds)
    if run.zero.zero_stage in (0, 3) or run.zero.offloads_optimizer:
        return seconds
    reductions = micro_batches if run.zero.zero_stage == 2 and not run.coalesces_grad_reduction else 1
    reduced = reductions * bytes_of_sums(run)
    gather = seconds * bytes_of(run) / (reduced + bytes_of(run))
    reduce, backward = seconds - gather, reductions * (passes.inputs + passes.weights)
    waiting = max(reduce - backward, 0.0) if run.overlaps_grad_reduce else reduce
    return waiting + (max(gather - passes.forward, 0.0) if run.overlaps_param_gather else gather)


def spans(parallel: ParallelConfig) -> dict[str, int]:
    """Kind of traffic to the span of its groups: their ranks differ by less than this."""
    inner = parallel.model_parallel_size * parallel.sequence_ranks
    replicas = inner * parallel.data_parallel_size
    return {
        "tensor": parallel.model_parallel_size,
        "sequence": inner,
        "pipeline": replicas * parallel.pipe_stages,
        "data": replicas,
        "experts": inner * parallel.expert_model_parallel_size,
    }


_MOST_STAGES = 8
"""Maximum number of simulated stages; the bubble of more stages is extrapolated."""


def idle_ratio(schedule: Schedule, seconds: PassSeconds) -> float:
    """Idle time divided by useful time of a pipeline whose stages all take ``seconds`` per micro-batch."""
    stages, micro_batches = schedule.stages, schedule.micro_batches
    if stages == 1 or schedule.name == "1f1b" or (schedule.name == "interleaved" and micro_batches % stages == 0):
        return bubble_ratio(stages, micro_batches, schedule.chunks)
    inputs, weights = (round(part / seconds.forward, 1) for part in (seconds.inputs, seconds.weights))
    return _idle_ratio(schedule, PassSeconds(1.0, inputs, weights))


@lru_cache(maxsize=4096)
def _idle_ratio(schedule: Schedule, seconds: PassSeconds) -> float:
    """``idle_ratio`` from a simulation."""
    stages, micro_batches, simulated = schedule.stages, schedule.micro_batches, schedule
    if schedule.name != "interleaved":  # more than two micro-batches for each stage do not change the idle time
        fewer = min(stages, _MOST_STAGES)
        fewer_micro_batches = ceil(fewer * min(micro_batches / stages, 2))
        simulated = replace(schedule, stages=fewer, micro_batches=fewer_micro_batches)
    idle = _idle_passes(simulated, seconds) * (stages - 1) / (simulated.stages - 1)
    return idle / (micro_batches * schedule.chunks * seconds.total)


_idle_passes = lru_cache(maxsize=4096)(idle_seconds)


def ring_all_reduce(n: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of ``n`` bytes."""
    return 2 * (ranks - 1) / ranks * n


def ring_gather(n: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-gather or reduce-scatter of ``n`` bytes."""
    return (ranks - 1) / ranks * n
