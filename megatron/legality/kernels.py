"""The rules about ways to compute the same faster."""

from megatron.config import RunConfig


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
