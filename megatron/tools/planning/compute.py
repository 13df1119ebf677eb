"""Estimated compute time of a micro-batch: matmuls, the attention core, and what is bound by the memory's bandwidth."""

from megatron.config import RunConfig
from megatron.model.partition import Stage
from megatron.model.spec import architecture_of, fp8_weights
from megatron.ops.choices import computed_scores
from megatron.parallel.pipeline.simulation import PassSeconds
from megatron.tools.planning.activations import kept_of, kernel_of_attention, sizes
from megatron.tools.planning.machine import Machine

_SMALL = 2.0e5
"""Elements of a rank's hidden states, tokens x its columns, at which matmuls reach half the rate of large ones."""
_STEPWISE = 0.5
"""Rate of an attention core that keeps its scores, relative to linear layers."""


def pass_seconds(run: RunConfig, machine: Machine, stage: Stage) -> PassSeconds:
    """Compute time of a micro-batch on a rank of ``stage``; the gradients of inputs with what is recomputed for them.

    The attention core has no weights, and its gradients take twice as long as its forward pass.
    """
    tokens = run.train.micro_batch_size * run.data.seq_length
    linears = sum(count * layer.matmul_flops for layer, count in stage.counts)
    in_blocks = sum(count * layer.matmul_flops for layer, count in stage.counts if layer.is_block)
    frozen = sum(count * layer.frozen_flops for layer, count in stage.counts)
    repeated = sum(count * layer.repeated_flops for layer, count in stage.counts)
    per_rank = tokens / (run.parallel.model_parallel_size * run.parallel.sequence_ranks)
    size = per_rank * run.model.hidden_size
    speed = machine.device.flops(run.precision.dtype) * machine.device.efficiency * size / (size + _SMALL)
    core, touched = core_seconds(run, machine, stage), _touching_seconds(run, machine, stage)
    saved, again = _saved_in_fp8(run, machine, stage), bool(run.activation.layers_together)
    repeats_core = again or run.model.recomputes_attention
    matmuls = (linears - saved, linears - saved + repeated + again * (in_blocks - saved), max(linears - frozen, 0))
    forward, inputs, weights = (per_rank * flops / speed for flops in matmuls)
    return PassSeconds(forward + core + touched, inputs + (2 + repeats_core) * core + (2 + again) * touched, weights)


def core_seconds(run: RunConfig, machine: Machine, stage: Stage) -> float:
    """The forward pass of the attention core. Flash attention leaves out what causality hides."""
    model, z = run.model, sizes(run)
    flops = sum(count * layer.attention_flops(run.data.seq_length) for layer, count in stage.counts)
    tokens = run.train.micro_batch_size * run.data.seq_length
    per_rank = tokens / (run.parallel.model_parallel_size * run.parallel.sequence_ranks)
    device, kernel = machine.device, kernel_of_attention(run, model, z)
    speed, is_ring = device.flops(run.precision.dtype) * device.efficiency, run.parallel.ring_size > 1
    if kernel.keeps_scores and not is_ring:
        return per_rank * flops / (speed * _STEPWISE)
    share = 1.0 if is_ring else computed_scores(model, kernel, z.s) / z.s**2
    if share == 1 and architecture_of(model).is_causal:
        share = 0.5
    return per_rank * flops * share / (speed * device.attention)


def _touching_seconds(run: RunConfig, machine: Machine, stage: Stage) -> float:
    """The forward pass of norms, activations, residual connections and the like, which read and write memory."""
    device, z = machine.device, sizes(run)
    times = device.touched + (device.quantized if run.model.fp8_format != "none" and device.fp8_speedup > 1 else 0.0)
    kept = float(sum(count * kept_of(z, layer) for layer, count in stage.counts))
    if run.model.recompute_mlp_activation:  # which is computed all the same, and once more with the gradients of inputs
        kept += 1.5 * stage.num_blocks * z.tokens * z.f * z.element // z.t
    return times * kept / device.memory_bandwidth


_ROWWISE = 0.8
"""Rate of FP8 with a scale for each row relative to one for each tensor (from torchao's gains for Llama 8B)."""


def _saved_in_fp8(run: RunConfig, machine: Machine, stage: Stage) -> float:
    """FLOPs per token that FP8 saves in a forward pass, and again in the gradients of inputs, as those of 16 bits."""
    rate = machine.device.fp8_speedup * (_ROWWISE if run.model.fp8_recipe == "rowwise" else 1.0)
    t = run.parallel.model_parallel_size
    weights = sum(count * weight.numel for layer, count in stage.counts for weight in fp8_weights(run.model, layer, t))
    return 2 * weights * (1 - 1 / rate) if machine.device.fp8_speedup > 1 else 0.0
