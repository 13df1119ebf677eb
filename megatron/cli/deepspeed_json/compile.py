"""Compiles flags and a JSON file into the DeepSpeed config of a run.

A setting with both a flag and a key may be provided in either place; in both, the values must be equal.
Keys without a flag are passed on unchanged.
"""

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron.cli.deepspeed_json.file import DEFAULT_OPTIMIZER, MAX_GRAD_NORM, OPTIMIZERS, optimizer_name
from megatron.cli.deepspeed_json.settings import (
    PARAMS,
    RECOMPUTE,
    SETTINGS,
    ZERO,
    KeyPath,
    optimizer_type,
    value_at,
)
from megatron.cli.provided import Provided
from megatron.config import RunConfig, flag_value
from megatron.model.partition import inputs_in_flight

_NO_REPORTS = 2**31 - 1
"""Steps between DeepSpeed's own reports to disable them; its pipeline engine does not accept null."""
_PARTITIONED = ("pipe_partitioned", "grad_partitioned")
_ALLOWS_UNTESTED = "zero_allow_untested_optimizer"
_UNTESTED_WITH_ZERO = ("Lamb",)
"""Optimizers whose updates under ZeRO are not those without it, which DeepSpeed runs with the key above only."""
_UNKNOWN_TO_ZERO = ("SGD", "Lion", "Muon")
"""Optimizers that DeepSpeed runs with that key only, too, and whose updates under ZeRO are right."""
_FORCES_ITS_OWN = "zero_force_ds_cpu_optimizer"
"""Whether DeepSpeed offloads its own optimizers only. Offloaded, Lion is ours."""
_MONITORS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Sections of DeepSpeed's monitors, and the package that each imports."""
_NEED_GPU = ("Lamb",)
"""Optimizers that are CUDA kernels only, unless they are offloaded."""


def compile_config(run: RunConfig, provided: Mapping[str, Provided], file: Mapping[str, Any]) -> dict[str, Any]:
    """The finished config for ``deepspeed.initialize``: everything in the file, completed from the run.

    Args:
        run: the resolved run, whose batch sizes agree.
        provided: what the user provided, which is written even if DeepSpeed does not need it.
        file: tree of the config file, or an empty one. It is not changed.

    The optimizer section asks for torch's AdamW unless the step is offloaded or --optimizer or the file names another
    optimizer. The engine replaces it by apex's if --fused-kernels allows it.
    """
    tree = copy.deepcopy(dict(file))
    optimizer = tree.setdefault("optimizer", {})
    optimizer["type"] = _run_optimizer(run, file)
    params = optimizer.setdefault("params", {})
    params.pop(MAX_GRAD_NORM, None)  # written as "gradient_clipping"
    known = OPTIMIZERS[optimizer["type"]]
    if "betas" in known:
        params.setdefault("betas", [run.optim.adam_beta1, run.optim.adam_beta2])
    _write_settings(tree, run, provided)
    if "torch_adam" in known:
        params.setdefault("torch_adam", run.zero.cpu_torch_adam or not run.zero.offloads_optimizer)
        if params["torch_adam"]:
            params.setdefault("fused", True)  # one kernel for the step, on the CPU as well
    if run.zero.zero_stage > 0 and optimizer["type"] in _UNKNOWN_TO_ZERO:
        tree.setdefault(_ALLOWS_UNTESTED, True)
    if run.zero.offloads_optimizer and optimizer["type"] == "Lion":
        tree[_FORCES_ITS_OWN] = False
    if _cause_of_complete_tensors(run):
        tree.setdefault("pipeline", {}).update(dict.fromkeys(_PARTITIONED, False))
    if run.observe.flops_profile_step is not None:
        tree["flops_profiler"] = {
            "enabled": True,
            "profile_step": run.observe.flops_profile_step - 1,  # counted from 0
            "output_file": str(Path(str(run.observe.profile_dir)) / "flops-profile.txt"),
        }
    if run.activation.contiguous_checkpointing and tree[RECOMPUTE].get("number_checkpoints") is None:
        in_flight = inputs_in_flight(run) if run.parallel.uses_pipeline else run.model.num_layers
        tree[RECOMPUTE]["number_checkpoints"] = in_flight
    if tree.get("steps_per_print") is None:
        tree["steps_per_print"] = run.log_interval if run.logging.verbose else _NO_REPORTS
        if not run.logging.verbose:  # it waits for the GPU twice in each micro-batch, for a report that is not printed
            tree.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    tree.setdefault("wall_clock_breakdown", False)
    return tree


def conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> list[str]:
    """A message for each key of a config file that does not fit the run."""
    problems = _optimizer_conflicts(run, file, provided)
    old, new = value_at(file, (*PARAMS, MAX_GRAD_NORM)), file.get("gradient_clipping")
    if None not in (old, new) and old != new:
        problems.append(
            f"optimizer.params.{MAX_GRAD_NORM} {old} and gradient_clipping {new} contradict each other: delete the "
            "former, which is the early name of the latter"
        )
    cause, section = _cause_of_complete_tensors(run), file.get("pipeline", {})
    problems += [
        f"pipeline.{key} true cannot be combined with {cause}: set it to false, or remove it"
        for key in _PARTITIONED
        if cause and section.get(key)
    ]
    if run.parallel.pipeline_schedule != "1f1b" and file.get("wall_clock_breakdown"):
        # DeepSpeed 0.19.8 would raise AssertionError: bwd_microstep timer has already been started.
        problems.append(
            f"wall_clock_breakdown true cannot be combined with --pipeline-schedule {run.parallel.pipeline_schedule}: "
            "set it to false, or remove it; --trace measures each pass"
        )
    for name, package in _MONITORS.items():
        if file.get(name, {}).get("enabled") and find_spec(package) is None:
            problems.append(
                f"{name}.enabled true needs {package}, which is not installed: pip install {package}, or set it to "
                "false"
            )
    if run.observe.flops_profile_step is not None and "flops_profiler" in file:
        problems.append("--flops-profile-step and flops_profiler in the JSON exclude each other: remove one")
    return problems + _gradient_scaling_conflicts(run, file)


def _gradient_scaling_conflicts(run: RunConfig, file: Mapping[str, Any]) -> list[str]:
    """Where DeepSpeed 0.19.8 refuses the keys that divide gradients before their reduction, or computes another mean.

    With reduce-scatter at stages 2 and 3 it raises AssertionError. Without, it divides by the factor, and does not
    multiply by it again if the factor is the number of ranks: ``__avg_scatter_contiguous_grads`` in
    runtime/zero/stage3.py, and ``gradient_reduction_w_predivide`` in stage_1_and_2.py, which is right without sequence
    parallelism.
    """
    parallel, stage = run.parallel, run.zero.zero_stage
    prescales, factor = bool(file.get("prescale_gradients")), file.get("gradient_predivide_factor", 1)
    given = [f"gradient_predivide_factor {factor:g}"] if factor != 1 else []
    given += ["prescale_gradients true"] if prescales else []
    if stage >= 2 and run.zero.zero_reduce_scatter:
        return [f"{key} does not work with reduce-scatter at ZeRO {stage}: remove it" for key in given]
    if factor == 1 or prescales or parallel.replica_size < 1:
        return []
    ranks = parallel.data_parallel_size * parallel.sequence_ranks
    is_wrong = stage == 3 or (stage > 0 and parallel.sequence_ranks > 1 and not run.zero.zero_reduce_scatter)
    if is_wrong and factor == ranks:
        return [f"{given[0]} makes gradients too small at ZeRO {stage}, where it is the number of ranks: remove it"]
    return []


def _optimizer_conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> list[str]:
    name = _run_optimizer(run, file)
    problems = []
    may_need = (*_UNTESTED_WITH_ZERO, *_UNKNOWN_TO_ZERO)
    if run.zero.zero_stage > 0 and name in may_need and not file.get(_ALLOWS_UNTESTED, name in _UNKNOWN_TO_ZERO):
        without = "--zero-stage 0" if run.precision.dtype == "fp32" else "fp32 at --zero-stage 0"
        problems.append(f'optimizer {name} is untested with ZeRO: use AdamW, {without}, or "{_ALLOWS_UNTESTED}": true')
    if run.zero.offloads_optimizer and name == "Lion" and file.get(_FORCES_ITS_OWN):
        problems.append(
            f'"{_FORCES_ITS_OWN}": true excludes Lion with --offload-optimizer, which is not DeepSpeed\'s: remove it'
        )
    if name in _NEED_GPU and run.parallel.device == "cpu" and not run.zero.offloads_optimizer:
        problems.append(f"optimizer {name} needs a GPU, and this host has none: use AdamW")
    of_adam = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_eps": "eps", "cpu_torch_adam": "torch_adam"}
    for field, param in of_adam.items():
        if field in provided and param not in OPTIMIZERS[name]:
            problems.append(f"{provided[field].source} has no effect on optimizer {name}: remove it")
    return problems


def _run_optimizer(run: RunConfig, file: Mapping[str, Any]) -> str:
    """The key of OPTIMIZERS that the file names, or else --optimizer."""
    return optimizer_name(file.get("optimizer", {}).get("type", "")) or optimizer_type(run.optim.optimizer)


def _cause_of_complete_tensors(run: RunConfig) -> str | None:
    """Why tensors between stages must not be partitioned over the tensor-parallel ranks; None if they may be."""
    parallel = run.parallel
    if not parallel.uses_pipeline:
        return None
    if parallel.sequence_parallel:
        return "--sequence-parallel, by which no two tensor-parallel ranks send the same tensor"
    if parallel.pipeline_schedule != "1f1b":
        return f"--pipeline-schedule {parallel.pipeline_schedule}, whose engine sends complete tensors only"
    if run.model.encoder_num_layers:
        return "a decoder that reads an encoder's output, of which DeepSpeed partitions only the first tensor"
    return None


def _write_settings(tree: dict[str, Any], run: RunConfig, provided: Mapping[str, Provided]) -> None:
    """Add to ``tree`` the settings of ``run`` that it does not have, and that DeepSpeed needs or the user provided."""
    params = OPTIMIZERS[optimizer_name(tree["optimizer"]["type"]) or DEFAULT_OPTIMIZER]
    needed = {
        "fp16": run.precision.fp16,
        ZERO: run.zero.zero_stage > 0,
        RECOMPUTE: run.activation.checkpoint_activations,
    }
    for setting in SETTINGS:
        of_other_optimizer = setting.optimizer not in (None, run.optim.optimizer) or (
            setting.key[:2] == PARAMS and setting.key[2] not in params
        )
        required = needed.get(str(setting.key[0]), True) or setting.field in (*provided, "zero_stage")
        # In half precision the file's stage 0 becomes 1; everything else that it has is the run's value.
        missing = value_at(tree, setting.key) is None or setting.field == "zero_stage"
        if required and setting.allowed(run) and not of_other_optimizer and missing:
            value = setting.write(flag_value(run, setting.field))
            if value is not None:
                _set(tree, setting.key, value)


def _set(tree: dict[str, Any], key: KeyPath, value: Any) -> None:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})  # type: ignore[arg-type]
    tree[key[-1]] = value  # type: ignore[index]
