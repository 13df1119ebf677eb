"""The rules about ZeRO and offload."""

import math

from megatron.config import RunConfig


def zero_with_pipeline(run: RunConfig) -> str | None:
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        return (
            f"--zero-stage {stage} cannot go with --pipe-parallel-size {stages}: the pipeline accumulates gradients "
            "over micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0"
        )
    return None


def offloaded_optimizer(run: RunConfig) -> str | None:
    device = run.zero.offload_optimizer
    if device == "cpu" and run.zero.zero_stage == 0:
        return f"--offload-optimizer {device} needs ZeRO, which partitions what is offloaded: add --zero-stage 1"
    return None


def optimizer_on_nvme(run: RunConfig) -> str | None:
    if run.zero.offload_optimizer == "nvme" and run.zero.zero_stage < 3:
        return "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu"
    return None


def offloaded_param(run: RunConfig) -> str | None:
    device = run.zero.offload_param
    if device != "none" and run.zero.zero_stage < 3:
        return f"--offload-param {device} works at ZeRO 3 only: use --zero-stage 3, or remove it"
    return None


def nvme_path(run: RunConfig) -> str | None:
    if run.zero.uses_nvme and run.zero.nvme_path is None:
        return "what is offloaded to nvme needs a folder on that device: add --nvme-path"
    if run.zero.nvme_path is not None and not run.zero.uses_nvme:
        return (
            "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme: add one, or remove it"
        )
    return None


def offload_settings(run: RunConfig) -> str | None:
    zero = run.zero
    if zero.cpu_torch_adam and not zero.offloads_optimizer:
        return "--cpu-torch-adam has no effect without --offload-optimizer: add it, or remove the former"
    if not zero.offload_pin_memory and not zero.offloads_optimizer and zero.offload_param == "none":
        return "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param: remove it"
    return None


def overlap_comm(run: RunConfig) -> str | None:
    if run.zero.zero_overlap_comm and run.parallel.uses_pipeline:
        return (
            "--zero-overlap-comm does not work in a pipeline, which reduces gradients behind its last micro-batch: "
            "remove it, or use --pipe-parallel-size 0"
        )
    if run.zero.zero_overlap_comm and run.zero.zero_stage == 0:
        return "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1, or remove it"
    return None


def round_robin_gradients(run: RunConfig) -> str | None:
    if run.zero.zero_round_robin_gradients and run.zero.zero_stage not in (1, 2):
        return (
            f"--zero-round-robin-gradients has no effect at --zero-stage {run.zero.zero_stage}: use --zero-stage 1 or "
            "2, or remove it"
        )
    return None


def half_precision_norm(run: RunConfig) -> str | None:
    if run.precision.dtype != "fp32" and run.zero.zero_stage == 0 and run.parallel.model_parallel_size > 1:
        return (
            f"--{run.precision.dtype} with --model-parallel-size {run.parallel.model_parallel_size} at --zero-stage 0 "
            "would clip by the gradient norm of one rank: use --zero-stage 1"
        )
    return None


def bf16_master_weights(run: RunConfig) -> str | None:
    parallel, precision = run.parallel, run.precision
    plain = not parallel.uses_pipeline and parallel.model_parallel_size == 1  # with more, another rule is against it
    if precision.bf16 and not precision.fp16 and run.zero.zero_stage == 0 and plain:
        return "--bf16 at --zero-stage 0 would keep no fp32 copy of the weights: use --zero-stage 1"
    return None


def device_precision(run: RunConfig) -> str | None:
    if run.precision.fp16 and run.parallel.device == "cpu":
        return "--fp16 does not work on the CPU: use --bf16, or neither for fp32"
    return None


def initial_loss_scale(run: RunConfig) -> str | None:
    scale = run.precision.initial_loss_scale
    if scale >= 1 and not math.log2(scale).is_integer():
        power = 2 ** round(math.log2(scale))
        return f"--initial-loss-scale {scale:g} is not a power of two: use {power}"
    return None


def min_scale(run: RunConfig) -> str | None:
    if run.precision.min_scale != int(run.precision.min_scale):
        return f"--min-scale {run.precision.min_scale:g} is not a whole number: use {round(run.precision.min_scale)}"
    return None


def hysteresis(run: RunConfig) -> str | None:
    precision, stage = run.precision, run.zero.zero_stage
    if precision.fp16 and stage == 0 and precision.hysteresis > 2:
        return (
            f"--hysteresis {precision.hysteresis} has no effect at --zero-stage 0, where each overflow halves the loss "
            "scale: use --zero-stage 1, or remove it"
        )
    return None


def half_precision_residual(run: RunConfig) -> str | None:
    if run.model.fp32_residual_connection and run.precision.dtype == "fp32":
        return "--fp32-residual-connection has no effect in fp32: add --bf16 or --fp16, or remove it"
    return None


def half_precision_loss(run: RunConfig) -> str | None:
    if run.model.fp16_lm_cross_entropy and run.precision.dtype == "fp32":
        return "--fp16-lm-cross-entropy has no effect in fp32: add --bf16 or --fp16, or remove it"
    return None


def grad_accum_dtype(run: RunConfig) -> str | None:
    accumulated, dtype = run.precision.grad_accum_dtype, run.precision.dtype
    if accumulated is None:
        return None
    if dtype == "fp32":
        return f"--grad-accum-dtype {accumulated} is for half precision, and weights are fp32: add --bf16, or remove it"
    if accumulated not in ("fp32", dtype):
        return f"--grad-accum-dtype {accumulated} cannot go with --{dtype}: use --grad-accum-dtype fp32"
    if accumulated == "fp32" and run.zero.zero_stage == 0:
        return "--grad-accum-dtype fp32 needs ZeRO, which keeps the sum: use --zero-stage 1"
    return None
