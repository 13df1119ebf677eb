"""Rules about ZeRO, offload, precision and activation checkpointing."""

import math

from megatron.cli.validation.rules import Messages, enabled, excludes, needs, rule
from megatron.config import RunConfig


@rule(
    "the pipeline runs at ZeRO 0 or 1",
    why="It accumulates gradients over micro-batches, so that sharded gradients would be reduced for each of them.",
    otherwise="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
)
def zero_with_pipeline(run: RunConfig) -> Messages:
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        yield (
            f"--zero-stage {stage} cannot be combined with --pipe-parallel-size {stages}: the pipeline accumulates "
            "gradients over micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0 (docs/parallelism.md, ZeRO 2 with a pipeline, compares their memory)"
        )


@rule(
    "fp16 needs a GPU",
    why="DeepSpeed does not support fp16 on the CPU, where bf16 works without a loss scale.",
    otherwise="ValueError: Type fp16 is not supported on your device.",
)
def device_precision(run: RunConfig) -> Messages:
    if run.precision.fp16 and run.parallel.device == "cpu":
        yield "--fp16 does not work on the CPU: use --bf16, or neither for fp32"


excludes(
    "precision.fp16",
    "precision.bf16",
    why="Weights have one type.",
    otherwise="AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
)


@rule("the initial loss scale is a power of two", why="DeepSpeed stores its exponent.")
def initial_loss_scale(run: RunConfig) -> Messages:
    scale = run.precision.initial_loss_scale
    if scale >= 1 and not math.log2(scale).is_integer():
        power = 2 ** round(math.log2(scale))
        yield f"--initial-loss-scale {scale:g} is not a power of two: use {power}"


@rule("the smallest loss scale is a whole number", why="DeepSpeed stores it as an integer.")
def min_scale(run: RunConfig) -> Messages:
    if run.precision.min_scale != int(run.precision.min_scale):
        yield f"--min-scale {run.precision.min_scale:g} is not a whole number: use {round(run.precision.min_scale)}"


needs("precision.fp16", "precision.loss_scale", only_warns=True)


@rule("a half-precision loss needs half precision", why="In fp32 the loss is computed in fp32 anyway.")
def half_precision_loss(run: RunConfig) -> Messages:
    if run.model.fp16_lm_cross_entropy and run.precision.dtype == "fp32":
        yield "--fp16-lm-cross-entropy has no effect in fp32: add --bf16 or --fp16, or remove it"


@rule("an fp32 residual connection needs half precision", why="In fp32 it is fp32 already.")
def half_precision_residual(run: RunConfig) -> Messages:
    if run.model.fp32_residual_connection and run.precision.dtype == "fp32":
        yield "--fp32-residual-connection has no effect in fp32: add --bf16 or --fp16, or remove it"


@rule("fp32 accumulation needs half precision", why="Gradients of fp32 weights are fp32 already.", only_warns=True)
def fp32_accumulation(run: RunConfig) -> Messages:
    if run.precision.grad_accum_dtype == run.precision.dtype == "fp32":
        yield "--grad-accum-dtype fp32 has no effect in fp32: add --bf16 or --fp16, or remove it"


@rule(
    "gradients accumulate in fp32 or in the weights' type",
    why="DeepSpeed supports no other combination.",
    otherwise="NotImplementedError: unsupported mix of model_dtype and grad_accum_dtype",
)
def grad_accum_dtype(run: RunConfig) -> Messages:
    accumulated, dtype = run.precision.grad_accum_dtype, run.precision.dtype
    if accumulated in (None, dtype):
        return
    if dtype == "fp32":
        yield f"--grad-accum-dtype {accumulated} is for half precision, and weights are fp32: add --bf16, or remove it"
    if accumulated not in ("fp32", dtype):
        yield f"--grad-accum-dtype {accumulated} cannot be combined with --{dtype}: use --grad-accum-dtype fp32"


@rule(
    "an offloaded optimizer needs ZeRO",
    why="DeepSpeed offloads only what ZeRO has partitioned.",
    otherwise="silently leaves it on the device",
)
def offloaded_optimizer(run: RunConfig) -> Messages:
    if run.zero.offload_optimizer == "cpu" and run.zero.zero_stage == 0:
        yield "--offload-optimizer cpu needs ZeRO, which partitions what is offloaded: add --zero-stage 1"


@rule(
    "an optimizer on NVMe needs ZeRO 3",
    why="Stages 1 and 2 do not offload to NVMe.",
    otherwise="silently keeps it in CPU memory",
)
def optimizer_on_nvme(run: RunConfig) -> Messages:
    if run.zero.offload_optimizer == "nvme" and run.zero.zero_stage < 3:
        yield "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu"


@rule("offloaded weights need ZeRO 3", why="At the other stages each rank keeps all weights.")
def offloaded_param(run: RunConfig) -> Messages:
    device = run.zero.offload_param
    if device != "none" and run.zero.zero_stage < 3:
        yield f"--offload-param {device} works at ZeRO 3 only: use --zero-stage 3, or remove it"


@rule(
    "frozen weights beside adapters are not on NVMe",
    why="DeepSpeed 0.19.8 saves those of a frozen weight's elements that are in memory.",
    otherwise="saves checkpoints without the frozen weights",
)
def frozen_weights_on_nvme(run: RunConfig) -> Messages:
    if run.model.lora_rank and run.zero.offload_param == "nvme":
        yield "--lora-rank does not work with --offload-param nvme: use --offload-param cpu"


@rule("offload to NVMe needs a folder", why="Offloaded state is written to files there.")
def nvme_path(run: RunConfig) -> Messages:
    if run.zero.uses_nvme and run.zero.nvme_path is None:
        yield "offload to nvme needs a folder on that device: add --nvme-path"
    if run.zero.nvme_path is not None and not run.zero.uses_nvme:
        yield (
            "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme: add one, or remove "
            "--nvme-path"
        )


needs("zero.offload_optimizer", "zero.cpu_torch_adam")


@rule("--no-offload-pin-memory needs offload", why="It would be silently ignored otherwise.")
def pinned_offload(run: RunConfig) -> Messages:
    zero = run.zero
    if not zero.offload_pin_memory and not zero.offloads_optimizer and zero.offload_param == "none":
        yield "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param: remove it"


@rule(
    "overlapped reduction needs ZeRO on the plain engine",
    why="Without ZeRO there is nothing to overlap, and DeepSpeed disables it in a pipeline.",
    otherwise="silently ignores it",
)
def overlap_comm(run: RunConfig) -> Messages:
    if run.zero.zero_overlap_comm and run.parallel.uses_pipeline:
        yield (
            "--zero-overlap-comm does not work in a pipeline, which reduces gradients after its last micro-batch: "
            "remove it, or use --pipe-parallel-size 0"
        )
    if run.zero.zero_overlap_comm and run.zero.zero_stage == 0:
        yield "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1, or remove it"


@rule(
    "coalesced reduction needs ZeRO 2 or 3",
    why="ZeRO 0 and 1 reduce gradients once per step in any case.",
)
def coalesced_reduction(run: RunConfig) -> Messages:
    if run.zero.zero_coalesce_grad_reduction and run.zero.zero_stage < 2:
        yield (
            f"--zero-coalesce-grad-reduction has no effect at --zero-stage {run.zero.zero_stage}, which reduces "
            "gradients once per step: use --zero-stage 2 or 3, or remove it"
        )


@rule(
    "coalesced reduction accumulates in the type of the weights",
    why="Until they are reduced, gradients are where the backward pass adds them up.",
    otherwise="silently accumulates in half precision",
)
def coalesced_in_half_precision(run: RunConfig) -> Messages:
    in_fp32 = run.precision.grad_accum_dtype == "fp32" != run.precision.dtype
    if run.zero.zero_coalesce_grad_reduction and in_fp32:
        yield (
            "--zero-coalesce-grad-reduction cannot be combined with --grad-accum-dtype fp32: remove one, or use "
            "--zero-stage 1, which reduces sums in fp32 once per step"
        )


@rule(
    "coalesced reduction at ZeRO 2 excludes overlapped reduction",
    why="Gradients are reduced when the last backward pass has finished.",
    otherwise="silently reduces them without overlap",
)
def coalesced_without_overlap(run: RunConfig) -> Messages:
    zero = run.zero
    if zero.zero_coalesce_grad_reduction and zero.zero_overlap_comm and zero.zero_stage == 2:
        yield (
            "--zero-coalesce-grad-reduction at --zero-stage 2 leaves nothing to overlap: remove it, or "
            "--zero-overlap-comm"
        )


@rule("round-robin gradients need ZeRO 1 or 2", why="At stage 3 each gradient is split over all ranks already.")
def round_robin_gradients(run: RunConfig) -> Messages:
    if run.zero.zero_round_robin_gradients and run.zero.zero_stage not in (1, 2):
        yield (
            f"--zero-round-robin-gradients has no effect at --zero-stage {run.zero.zero_stage}: use --zero-stage 1 or "
            "2, or remove it"
        )


needs(
    "activation.checkpoint_activations",
    "activation.partition_activations",
    "activation.contiguous_checkpointing",
    "activation.checkpoint_in_cpu",
    "activation.synchronize_each_layer",
    "activation.profile_backward",
    "activation.checkpoint_num_layers",
    only_warns=True,
)


@rule(
    "selective recomputation is neither partitioned nor grouped",
    why="It keeps query, key and value of each layer, which differ between tensor-parallel ranks.",
)
def selective_recomputation(run: RunConfig) -> Messages:
    layers, partitioned = run.activation.checkpoint_num_layers, run.activation.partition_activations
    rivals = enabled({"--partition-activations": partitioned, f"--checkpoint-num-layers {layers}": layers > 1})
    if run.activation.recompute_granularity == "selective" and rivals:
        yield f"{rivals} cannot be combined with --recompute-granularity selective: use full, or remove {rivals}"


@rule(
    "partitioned activations exclude --sequence-parallel",
    why="DeepSpeed partitions what all tensor-parallel ranks hold alike, and gathers it again; parts of a sequence "
    "differ between the ranks.",
    otherwise="silently computes with mixed-up activations",
)
def partitioned_sequence(run: RunConfig) -> Messages:
    if run.parallel.sequence_parallel and run.activation.partition_activations:
        yield (
            "--partition-activations cannot be combined with --sequence-parallel, by which each rank keeps a part of "
            "the sequence already: remove one"
        )


@rule(
    "activations in one buffer, or in CPU memory, are partitioned",
    why="DeepSpeed supports both for partitioned activations only.",
    otherwise="AssertionError: Contiguous Checkpointing is only available with partitioned activations; for those in "
    "CPU memory, an error in the middle of the backward pass",
)
def partitioned_activations(run: RunConfig) -> Messages:
    activation = run.activation
    in_buffer, in_cpu = activation.contiguous_checkpointing, activation.checkpoint_in_cpu
    options = enabled({"--contiguous-checkpointing": in_buffer, "--checkpoint-in-cpu": in_cpu})
    if options and activation.checkpoint_activations and not activation.partition_activations:
        yield f"{options} cannot work without --partition-activations: add it"
