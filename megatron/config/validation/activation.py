"""The rules about recomputation."""

from megatron.config import RunConfig


def recomputed_layers(run: RunConfig) -> str | None:
    if run.activation.checkpoint_num_layers > 1 and not run.activation.checkpoint_activations:
        return "--checkpoint-num-layers has no effect without --checkpoint-activations: add it, or remove the former"
    return None


def selective_recomputation(run: RunConfig) -> str | None:
    activation = run.activation
    asked = {
        "--partition-activations": activation.partition_activations,
        f"--checkpoint-num-layers {activation.checkpoint_num_layers}": activation.checkpoint_num_layers > 1,
    }
    said = [name for name, on in asked.items() if on]
    if activation.recompute_granularity == "selective" and said:
        return f"{' and '.join(said)} cannot go with --recompute-granularity selective: use full, or remove the former"
    return None


def partitioned_sequence(run: RunConfig) -> str | None:
    if run.parallel.sequence_parallel and run.activation.partition_activations:
        return (
            "--partition-activations cannot go with --sequence-parallel, by which each rank keeps a part of the "
            "sequence already: remove one"
        )
    return None


def partitioned_activations(run: RunConfig) -> str | None:
    activation = run.activation
    asked = {
        "--contiguous-checkpointing": activation.contiguous_checkpointing,
        "--checkpoint-in-cpu": activation.checkpoint_in_cpu,
    }
    said = [name for name, on in asked.items() if on]
    if said and not activation.partition_activations:
        return f"{' and '.join(said)} cannot work without --partition-activations: add it"
    return None


def compiled_layers(run: RunConfig) -> str | None:
    if run.model.compile and run.zero.zero_stage == 3:
        return "--compile does not work at --zero-stage 3: use --zero-stage 2, or remove it"
    return None


def gradients_in_place(run: RunConfig) -> str | None:
    zero = run.zero
    if run.model.gradient_accumulation_fusion and run.train.gradient_accumulation_steps == 1:
        return (
            "--gradient-accumulation-fusion has no effect with one micro-batch a step: raise --gas or "
            "--global-batch-size, or remove it"
        )
    taken_away = (
        (zero.zero_stage > 1, "--zero-stage 1"),
        (zero.zero_overlap_comm, "no --zero-overlap-comm"),
        (zero.offloads_optimizer, "no --offload-optimizer"),
        (run.precision.dtype != "fp32" and run.precision.grad_accum_dtype == "fp32", "no --grad-accum-dtype fp32"),
    )
    instead = [remedy for broken, remedy in taken_away if broken]
    if run.model.gradient_accumulation_fusion and instead:
        return (
            "--gradient-accumulation-fusion has no effect where DeepSpeed takes gradients away after each micro-batch: "
            f"use {' and '.join(instead)}, or remove it"
        )
    return None
