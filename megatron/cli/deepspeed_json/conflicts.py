"""Keys of a DeepSpeed JSON that contradict the run, or that DeepSpeed does not support with it."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.cli.deepspeed_json import (
    ALLOW_UNTESTED,
    CORRECT_WITH_ZERO,
    FORCE_DEEPSPEED_OPTIMIZER,
    PARAMS,
    PARTITIONED,
    ZERO,
    run_optimizer,
    value_at,
)
from megatron.cli.deepspeed_json.file import MAX_GRAD_NORM, OPTIMIZERS
from megatron.cli.provided import Provided
from megatron.config import RunConfig


def conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> Iterator[str]:
    """A message for each key of a config file that contradicts the run or is not supported with it."""
    yield from _optimizer_conflicts(run, file, provided)
    old, new = value_at(file, (*PARAMS, MAX_GRAD_NORM)), file.get("gradient_clipping")
    if None not in (old, new) and old != new:
        yield (
            f"optimizer.params.{MAX_GRAD_NORM} {old} and gradient_clipping {new} contradict each other: delete "
            f"{MAX_GRAD_NORM}, the old name of gradient_clipping"
        )
    for key in PARTITIONED:
        if run.parallel.uses_pipeline and file.get("pipeline", {}).get(key):
            yield (
                f"pipeline.{key} true is not supported: use --sequence-parallel, with which tensor-parallel ranks send "
                "a part of each tensor, and set the key to false, or remove it"
            )
    schedule = run.parallel.pipeline_schedule
    if schedule != "1f1b" and file.get("wall_clock_breakdown"):
        # DeepSpeed 0.19.8 raises AssertionError: bwd_microstep timer has already been started.
        yield (
            f"wall_clock_breakdown true cannot be combined with --pipeline-schedule {schedule}: set it to false, or "
            "remove it; --trace measures each pass"
        )
    accelerated = [
        f"{ZERO}.{key}" for key, value in file.get(ZERO, {}).items() if key.startswith("zero_quantized_") and value
    ]
    switches = (("aio", "use_gds"), (ZERO, "offload_optimizer", "super_offload"))
    accelerated += [".".join(switch) for switch in switches if value_at(file, switch)]
    if accelerated and run.parallel.device == "cpu":
        yield f"{accelerated[0]} needs a GPU, and this host has none: remove it"
    if run.observe.flops_profile_step is not None and "flops_profiler" in file:
        yield "--flops-profile-step and flops_profiler in the JSON exclude each other: remove one"
    yield from _gradient_scaling_conflicts(run, file)
    yield from _master_weight_conflicts(run, file)
    yield from _gradient_norm_conflicts(run, file)
    for key, others in {"param_dtype": "", "grad_accum_dtype": "fp32 bf16"}.items():  # the flag's rules check these
        dtype = value_at(file, ("data_types", key))
        if dtype and _DTYPES.get(dtype.removeprefix("torch."), dtype) not in (run.precision.dtype, *others.split()):
            yield f"data_types.{key} {dtype} contradicts a run in {run.precision.dtype}: remove it, or set the flag"
    ratio = value_at(file, (ZERO, "offload_optimizer", "ratio"))
    if ratio is not None and ratio < 1 and not (run.zero.zero_stage == 3 and _has_deepspeeds_adam(run)):
        needed = "--zero-stage 3, and DeepSpeed's Adam by --offload-optimizer cpu"
        yield f"{ZERO}.offload_optimizer.ratio {ratio:g} needs {needed}: remove it"


_DTYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
"""Other names of types in the JSON."""


def _gradient_norm_conflicts(run: RunConfig, file: Mapping[str, Any]) -> Iterator[str]:
    """Messages where DeepSpeed 0.19.8 raises ValueError about gradients without a norm."""
    zero, sums = run.zero, run.precision.bf16 and run.precision.grad_accum_dtype == "fp32"
    obstacles = {
        f"ZeRO {zero.zero_stage}, only with 1 and 2": zero.zero_stage not in (1, 2),
        "clipping (--clip-grad 0 turns it off)": run.optim.clip_grad > 0,
        "--offload-optimizer": zero.offloads_optimizer,
        "fp32 sums of bf16 gradients at ZeRO 1": sums and zero.zero_stage == 1,
    }
    met = next((name for name, is_met in obstacles.items() if is_met), None)
    if met and value_at(file, (ZERO, "compute_grad_norm")) is False:
        yield f"compute_grad_norm false does not work with {met}: remove it"


def _has_deepspeeds_adam(run: RunConfig) -> bool:
    return run.zero.offloads_optimizer and run.optim.optimizer == "adam" and not run.zero.cpu_torch_adam


def _master_weight_conflicts(run: RunConfig, file: Mapping[str, Any]) -> Iterator[str]:
    """Messages where DeepSpeed 0.19.8 raises AssertionError about master weights in half precision."""
    zero, states = run.zero, bool(value_at(file, ("bf16", "bf16_optimizer_states")))
    is_deepspeeds = _has_deepspeeds_adam(run)
    for dtype, fits in (("bf16", is_deepspeeds or (states and not zero.offloads_optimizer)), ("fp16", is_deepspeeds)):
        key = f"{dtype}_master_weights_and_grads"
        is_on = bool(value_at(file, (dtype, key)))
        if is_on and not (fits and run.precision.dtype == dtype):
            other = ', or "bf16_optimizer_states": true' if dtype == "bf16" else ""
            yield f"{key} true needs --{dtype}, and DeepSpeed's Adam by --offload-optimizer cpu{other}: remove it"
        elif dtype == "bf16" and states and not is_on:
            yield f'bf16_optimizer_states true needs "{key}": true: add it, or remove bf16_optimizer_states'


def _gradient_scaling_conflicts(run: RunConfig, file: Mapping[str, Any]) -> Iterator[str]:
    """Messages where DeepSpeed 0.19.8 rejects gradient scaling before the reduction, or computes a wrong mean with it.

    With reduce-scatter at stages 2 and 3 it raises AssertionError. Without, it divides by the factor, and does not
    multiply by it again if the factor equals the number of ranks: ``__avg_scatter_contiguous_grads`` in
    runtime/zero/stage3.py, and ``gradient_reduction_w_predivide`` in stage_1_and_2.py, which is correct without
    sequence parallelism.
    """
    zero, stage, sequence = run.zero, run.zero.zero_stage, run.parallel.sequence_ranks
    prescales, factor = bool(file.get("prescale_gradients")), file.get("gradient_predivide_factor", 1)
    scatters = stage >= 2 and zero.zero_reduce_scatter
    divides_twice = stage == 3 or (stage > 0 and sequence > 1 and not zero.zero_reduce_scatter)
    ranks = run.parallel.data_parallel_size * sequence if run.parallel.replica_size >= 1 else 0
    is_wrong = divides_twice and factor == ranks
    if prescales and scatters:
        yield f"prescale_gradients true does not work with reduce-scatter at ZeRO {stage}: remove it"
    if factor != 1 and (scatters or (is_wrong and not prescales)):
        yield f"gradient_predivide_factor {factor:g} does not work at ZeRO {stage} with these settings: remove it"


def _optimizer_conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> Iterator[str]:
    name, zero = run_optimizer(run, file), run.zero
    is_correct = name in CORRECT_WITH_ZERO
    if zero.zero_stage > 0 and (is_correct or name == "Lamb") and not file.get(ALLOW_UNTESTED, is_correct):
        without_zero = "--zero-stage 0" if run.precision.dtype == "fp32" else "fp32 at --zero-stage 0"
        yield f'optimizer {name} is untested with ZeRO: use AdamW, {without_zero}, or "{ALLOW_UNTESTED}": true'
    if zero.offloads_optimizer and name == "Lion" and file.get(FORCE_DEEPSPEED_OPTIMIZER):
        yield f'"{FORCE_DEEPSPEED_OPTIMIZER}": true excludes Lion with --offload-optimizer: remove it'
    if name == "Lamb" and run.parallel.device == "cpu" and not zero.offloads_optimizer:
        yield f"optimizer {name} needs a GPU, and this host has none: use AdamW"
    adam_params = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_eps": "eps", "cpu_torch_adam": "torch_adam"}
    for field, param in adam_params.items():
        if field in provided and param not in OPTIMIZERS[name]:
            yield f"{provided[field].source} has no effect on optimizer {name}: remove it"
