"""Rules about ZeRO, offload, precision and activation checkpointing."""

import math

from megatron.config import RunConfig
from megatron.config.validation.rules import excludes, needs, rule


@rule(
    "the pipeline runs at ZeRO 0 or 1",
    why="It accumulates gradients over micro-batches, so that sharded gradients would be reduced for each of them.",
    otherwise="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
)
def zero_with_pipeline(run: RunConfig) -> str | None:
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        return (
            f"--zero-stage {stage} cannot be combined with --pipe-parallel-size {stages}: the pipeline accumulates "
            "gradients over micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0"
        )
    return None


@rule(
    "half precision with tensor parallelism needs ZeRO",
    why="At stage 0 DeepSpeed omits the other tensor-parallel ranks from the gradient norm, so that clipping is wrong.",
    otherwise="clips by a wrong norm, or raises: stack expects a non-empty TensorList",
)
def half_precision_norm(run: RunConfig) -> str | None:
    if run.precision.dtype != "fp32" and run.zero.zero_stage == 0 and run.parallel.model_parallel_size > 1:
        return (
            f"--{run.precision.dtype} with --model-parallel-size {run.parallel.model_parallel_size} at --zero-stage 0 "
            "would clip by the gradient norm of one rank: use --zero-stage 1"
        )
    return None


@rule(
    "bf16 weights have an fp32 copy",
    why="An update is often smaller than the precision of a bf16 weight, and would be rounded away.",
    otherwise="silently updates the bf16 weights themselves",
)
def bf16_master_weights(run: RunConfig) -> str | None:
    parallel, precision = run.parallel, run.precision
    plain = not parallel.uses_pipeline and parallel.model_parallel_size == 1  # half_precision_norm covers the rest
    if precision.bf16 and not precision.fp16 and run.zero.zero_stage == 0 and plain:
        return "--bf16 at --zero-stage 0 would keep no fp32 copy of the weights: use --zero-stage 1"
    return None


@rule(
    "fp16 needs a GPU",
    why="DeepSpeed does not support fp16 on the CPU, where bf16 works without a loss scale.",
    otherwise="ValueError: Type fp16 is not supported on your device.",
)
def device_precision(run: RunConfig) -> str | None:
    if run.precision.fp16 and run.parallel.device == "cpu":
        return "--fp16 does not work on the CPU: use --bf16, or neither for fp32"
    return None


excludes(
    "precision.fp16",
    "precision.bf16",
    why="Weights have one type.",
    otherwise="AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
)


@rule("the initial loss scale is a power of two", why="DeepSpeed stores its exponent.")
def initial_loss_scale(run: RunConfig) -> str | None:
    scale = run.precision.initial_loss_scale
    if scale >= 1 and not math.log2(scale).is_integer():
        power = 2 ** round(math.log2(scale))
        return f"--initial-loss-scale {scale:g} is not a power of two: use {power}"
    return None


@rule("the smallest loss scale is a whole number", why="DeepSpeed stores it as an integer.")
def min_scale(run: RunConfig) -> str | None:
    if run.precision.min_scale != int(run.precision.min_scale):
        return f"--min-scale {run.precision.min_scale:g} is not a whole number: use {round(run.precision.min_scale)}"
    return None


@rule(
    "hysteresis of the loss scale needs ZeRO",
    why="Without ZeRO DeepSpeed uses another optimizer wrapper, whose loss scale halves at the first overflow.",
)
def hysteresis(run: RunConfig) -> str | None:
    precision, stage = run.precision, run.zero.zero_stage
    if precision.fp16 and stage == 0 and precision.hysteresis > 2:
        return (
            f"--hysteresis {precision.hysteresis} has no effect at --zero-stage 0, where each overflow halves the loss "
            "scale: use --zero-stage 1, or remove it"
        )
    return None


needs("precision.loss_scale", "precision.fp16")


@rule("a half-precision loss needs half precision", why="In fp32 the loss is computed in fp32 anyway.")
def half_precision_loss(run: RunConfig) -> str | None:
    if run.model.fp16_lm_cross_entropy and run.precision.dtype == "fp32":
        return "--fp16-lm-cross-entropy has no effect in fp32: add --bf16 or --fp16, or remove it"
    return None


@rule("an fp32 residual connection needs half precision", why="In fp32 it is fp32 already.")
def half_precision_residual(run: RunConfig) -> str | None:
    if run.model.fp32_residual_connection and run.precision.dtype == "fp32":
        return "--fp32-residual-connection has no effect in fp32: add --bf16 or --fp16, or remove it"
    return None


@rule(
    "gradients accumulate in fp32 or in the weights' type",
    why="DeepSpeed supports no other combination, and none without ZeRO.",
    otherwise="NotImplementedError: unsupported mix of model_dtype and grad_accum_dtype",
)
def grad_accum_dtype(run: RunConfig) -> str | None:
    accumulated, dtype = run.precision.grad_accum_dtype, run.precision.dtype
    if accumulated is None:
        return None
    if dtype == "fp32":
        return f"--grad-accum-dtype {accumulated} is for half precision, and weights are fp32: add --bf16, or remove it"
    if accumulated not in ("fp32", dtype):
        return f"--grad-accum-dtype {accumulated} cannot be combined with --{dtype}: use --grad-accum-dtype fp32"
    if accumulated == "fp32" and run.zero.zero_stage == 0:
        return "--grad-accum-dtype fp32 needs ZeRO, which keeps the sum: use --zero-stage 1"
    return None


@rule(
    "an offloaded optimizer needs ZeRO",
    why="DeepSpeed offloads only what ZeRO has partitioned.",
    otherwise="silently leaves it on the device",
)
def offloaded_optimizer(run: RunConfig) -> str | None:
    device = run.zero.offload_optimizer
    if device == "cpu" and run.zero.zero_stage == 0:
        return f"--offload-optimizer {device} needs ZeRO, which partitions what is offloaded: add --zero-stage 1"
    return None


@rule(
    "an optimizer on NVMe needs ZeRO 3",
    why="Stages 1 and 2 do not offload to NVMe.",
    otherwise="silently keeps it in CPU memory",
)
def optimizer_on_nvme(run: RunConfig) -> str | None:
    if run.zero.offload_optimizer == "nvme" and run.zero.zero_stage < 3:
        return "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu"
    return None


@rule("offloaded weights need ZeRO 3", why="At the other stages each rank keeps all weights.")
def offloaded_param(run: RunConfig) -> str | None:
    device = run.zero.offload_param
    if device != "none" and run.zero.zero_stage < 3:
        return f"--offload-param {device} works at ZeRO 3 only: use --zero-stage 3, or remove it"
    return None


@rule("offload to NVMe needs a folder", why="Offloaded state is written to files there.")
def nvme_path(run: RunConfig) -> str | None:
    if run.zero.uses_nvme and run.zero.nvme_path is None:
        return "offload to nvme needs a folder on that device: add --nvme-path"
    if run.zero.nvme_path is not None and not run.zero.uses_nvme:
        return (
            "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme: add one, or remove "
            "--nvme-path"
        )
    return None


needs("zero.cpu_torch_adam", "zero.offload_optimizer")


@rule("--no-offload-pin-memory needs offload", why="It would be silently ignored otherwise.")
def pinned_offload(run: RunConfig) -> str | None:
    zero = run.zero
    if not zero.offload_pin_memory and not zero.offloads_optimizer and zero.offload_param == "none":
        return "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param: remove it"
    return None


@rule(
    "overlapped reduction needs ZeRO on the plain engine",
    why="Without ZeRO there is nothing to overlap, and DeepSpeed disables it in a pipeline.",
    otherwise="silently ignores it",
)
def overlap_comm(run: RunConfig) -> str | None:
    if run.zero.zero_overlap_comm and run.parallel.uses_pipeline:
        return (
            "--zero-overlap-comm does not work in a pipeline, which reduces gradients after its last micro-batch: "
            "remove it, or use --pipe-parallel-size 0"
        )
    if run.zero.zero_overlap_comm and run.zero.zero_stage == 0:
        return "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1, or remove it"
    return None


@rule("round-robin gradients need ZeRO 1 or 2", why="At stage 3 each gradient is split over all ranks already.")
def round_robin_gradients(run: RunConfig) -> str | None:
    if run.zero.zero_round_robin_gradients and run.zero.zero_stage not in (1, 2):
        return (
            f"--zero-round-robin-gradients has no effect at --zero-stage {run.zero.zero_stage}: use --zero-stage 1 or "
            "2, or remove it"
        )
    return None


needs("activation.partition_activations", "activation.checkpoint_activations")
needs("activation.contiguous_checkpointing", "activation.checkpoint_activations")
needs("activation.checkpoint_in_cpu", "activation.checkpoint_activations")
needs("activation.synchronize_each_layer", "activation.checkpoint_activations")
needs("activation.profile_backward", "activation.checkpoint_activations")
needs("activation.checkpoint_num_layers", "activation.checkpoint_activations")


@rule(
    "selective recomputation is neither partitioned nor grouped",
    why="It keeps query, key and value of each layer, which differ between tensor-parallel ranks.",
)
def selective_recomputation(run: RunConfig) -> str | None:
    activation = run.activation
    settings = {
        "--partition-activations": activation.partition_activations,
        f"--checkpoint-num-layers {activation.checkpoint_num_layers}": activation.checkpoint_num_layers > 1,
    }
    enabled = " and ".join(name for name, on in settings.items() if on)
    if activation.recompute_granularity == "selective" and enabled:
        return f"{enabled} cannot be combined with --recompute-granularity selective: use full, or remove {enabled}"
    return None


@rule(
    "partitioned activations exclude --sequence-parallel",
    why="DeepSpeed partitions what all tensor-parallel ranks hold alike, and gathers it again; parts of a sequence "
    "differ between the ranks.",
    otherwise="silently computes with mixed-up activations",
)
def partitioned_sequence(run: RunConfig) -> str | None:
    if run.parallel.sequence_parallel and run.activation.partition_activations:
        return (
            "--partition-activations cannot be combined with --sequence-parallel, by which each rank keeps a part of "
            "the sequence already: remove one"
        )
    return None


@rule(
    "activations in one buffer, or in CPU memory, are partitioned",
    why="DeepSpeed supports both for partitioned activations only.",
    otherwise="AssertionError: Contiguous Checkpointing is only available with partitioned activations; for those in "
    "CPU memory, an error in the middle of the backward pass",
)
def partitioned_activations(run: RunConfig) -> str | None:
    activation = run.activation
    settings = {
        "--contiguous-checkpointing": activation.contiguous_checkpointing,
        "--checkpoint-in-cpu": activation.checkpoint_in_cpu,
    }
    enabled = " and ".join(name for name, on in settings.items() if on)
    if enabled and not activation.partition_activations:
        return f"{enabled} cannot work without --partition-activations: add it"
    return None
