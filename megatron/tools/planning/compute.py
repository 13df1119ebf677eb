"""Estimated compute time of a micro-batch: matmuls, attention core, and memory-bound operations."""

import math
from collections.abc import Iterator
from functools import lru_cache

from megatron.config import RunConfig
from megatron.model.partition import Stage
from megatron.model.spec import LayerSpec, ParameterSpec, architecture_of, fp8_weights
from megatron.ops.choices import computed_scores
from megatron.parallel.pipeline.simulation import PassSeconds
from megatron.tools.planning.activations import kept_of, kernel_of_attention, sizes
from megatron.tools.planning.machine import Machine
from megatron.tools.planning.states import bytes_of

_SMALL = 2.0e5
"""Elements of hidden states (tokens x columns of a rank) at which kernel launches take as long as the matmuls."""
_TILES = ((128, 256), (256, 128))
"""Rows and columns of the tiles that a multiprocessor computes in large cuBLAS matmuls."""
_UNFUSED = 0.5
"""Rate of an attention core that keeps its scores, relative to linear layers."""
_ROWWISE = 0.8
"""Rate of FP8 with rowwise scales relative to tensorwise scales (from torchao's gains for Llama 8B)."""
BACKWARD = 2.5
"""Time of flash attention's backward pass (five matmuls) relative to forward (two) (arXiv 2307.08691, 4.1)."""


def pass_seconds(run: RunConfig, machine: Machine, stage: Stage) -> PassSeconds:
    """Compute time of a micro-batch on a rank of ``stage``; recomputation counts with the input gradients.

    The attention core has no weights.
    """
    forward = inputs = weights = 0.0
    recomputes = bool(run.activation.layers_together)
    for layer, count in stage.counts:
        passes = _matmul_seconds(run, machine, layer)
        repeated = layer.repeated_flops / layer.matmul_flops if layer.repeated_flops else 0.0
        repeated += recomputes * layer.is_block
        frozen = layer.frozen_flops / layer.matmul_flops if layer.matmul_flops else 0.0
        forward += count * passes.forward
        inputs += count * (passes.inputs + repeated * passes.forward)
        weights += count * passes.weights * (1 - frozen)
    core, memory_bound = core_seconds(run, machine, stage), _memory_bound_seconds(run, machine, stage)
    cores = (2.0 if _keeps_scores(run) else BACKWARD) + (recomputes or run.model.recomputes_attention)
    inputs += cores * core + (2 + recomputes) * memory_bound
    return PassSeconds(forward + core + memory_bound, inputs, max(weights, 0.0))


def _matmul_seconds(run: RunConfig, machine: Machine, layer: LayerSpec) -> PassSeconds:
    """Seconds of a layer's matmuls: tiles in full waves, and writing results, which does not overlap with compute.

    Other FLOPs, and experts, are assumed to run at the rate of large matmuls.
    """
    model, parallel, device = run.model, run.parallel, machine.device
    t, rows = parallel.model_parallel_size, run.train.micro_batch_size * run.data.seq_length // parallel.sequence_ranks
    size = rows / t * model.hidden_size
    rate = device.flops(run.precision.dtype) * device.efficiency * size / (size + _SMALL)
    in_fp8 = fp8_weights(model, layer, t) if device.fp8_speedup > 1 else ()
    fp8_speedup = device.fp8_speedup * (_ROWWISE if model.fp8_recipe == "rowwise" else 1.0)
    forward = inputs = weights = flops = 0.0
    for weight in layer.parameters if layer.matmul_flops else ():
        if len(weight.shape) in (2, 3) and not weight.is_expert:
            speed = rate * (fp8_speedup if weight in in_fp8 else 1.0)
            for n, k in _shapes(layer, weight, t, device.joined):
                write_seconds = bytes_of(run) * rows / device.memory_bandwidth
                matmul_flops = 2 * rows * n * k
                forward += matmul_flops * waves(rows, n, device.processors) / speed + n * write_seconds
                inputs += matmul_flops * waves(rows, k, device.processors) / speed + k * write_seconds
                weights += matmul_flops * waves(n, k, device.processors) / rate
                flops += matmul_flops
    layer_flops = rows * layer.matmul_flops / t
    share = min(layer_flops / flops, 1.0) if flops else 0.0
    others = (layer_flops - share * flops) / rate
    return PassSeconds(share * forward + others, share * inputs + others, share * weights + others)


def _shapes(layer: LayerSpec, weight: ParameterSpec, t: int, joined: bool) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of a rank's matmuls with a fused weight: one matmul if ``joined``, otherwise one per part."""
    inputs = weight.shape[-1] // (t if weight.shard_dim == len(weight.shape) - 1 else 1)
    outputs = weight.local_numel(t) // inputs
    parts = [outputs]
    if not joined and len(weight.shape) == 3:  # gate and up projection
        parts = [outputs // 2] * 2
    elif not joined and weight.name.endswith("query_key_value.weight"):
        query = layer.attention_size // t
        parts = [query, *[(outputs - query) // 2] * 2]
    for part in parts:
        yield part, inputs


@lru_cache(maxsize=65536)
def waves(rows: int, columns: int, processors: int) -> float:
    """Slowdown of a matmul with a result of this shape, relative to full use of all ``processors``.

    Edge tiles take as long as full ones, and the last wave of tiles as long as the others (NVIDIA, Matrix
    Multiplication Background User's Guide, chapter 3).
    """
    if not processors:
        return 1.0
    tiles = ((math.ceil(rows / height) * math.ceil(columns / width), height * width) for height, width in _TILES)
    return min(math.ceil(count / processors) * area for count, area in tiles) * processors / (rows * columns)


def core_seconds(run: RunConfig, machine: Machine, stage: Stage) -> float:
    """Seconds of the attention core's forward pass. Flash attention skips causally masked blocks."""
    model, z = run.model, sizes(run)
    flops = sum(count * layer.attention_flops(run.data.seq_length) for layer, count in stage.counts)
    tokens = run.train.micro_batch_size * run.data.seq_length
    per_rank = tokens / (run.parallel.model_parallel_size * run.parallel.sequence_ranks)
    device = machine.device
    speed, is_ring = device.flops(run.precision.dtype) * device.efficiency, run.parallel.ring_size > 1
    if _keeps_scores(run):
        return per_rank * flops / (speed * _UNFUSED)
    share = 1.0 if is_ring else computed_scores(model, kernel_of_attention(run, model, z), z.s) / z.s**2
    if share == 1 and architecture_of(model).is_causal:
        share = 0.5
    remote = (1 + (run.parallel.ring_size - 1) * device.remote) / run.parallel.ring_size
    return per_rank * flops * share * remote / (speed * device.attention)


def _keeps_scores(run: RunConfig) -> bool:
    return run.parallel.ring_size == 1 and kernel_of_attention(run, run.model, sizes(run)).keeps_scores


def _memory_bound_seconds(run: RunConfig, machine: Machine, stage: Stage) -> float:
    """Seconds of the forward pass of norms, activations, residual connections and other memory-bound operations."""
    device, z = machine.device, sizes(run)
    times = device.touched + (device.quantized if run.model.fp8_format != "none" and device.fp8_speedup > 1 else 0.0)
    kept = float(sum(count * kept_of(z, layer) for layer, count in stage.counts))
    if run.model.recompute_mlp_activation:  # computed in the forward pass, and again with the input gradients
        kept += 1.5 * stage.num_blocks * z.tokens * z.f * z.element // z.t
    return times * kept / device.memory_bandwidth
