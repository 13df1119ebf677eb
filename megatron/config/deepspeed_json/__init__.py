"""Compiles flags and a JSON file into the DeepSpeed config of a run.

A setting with both a flag and a key may be provided in either place; in both, the values must be equal.
Keys without a flag are passed on unchanged.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ObserveConfig, ParallelConfig, RunConfig
from megatron.config.deepspeed_json.keys import DEFAULT_OPTIMIZER, OPTIMIZERS, optimizer_name
from megatron.config.deepspeed_json.settings import RECOMPUTE, write_settings
from megatron.config.fields import Provided
from megatron.parallel.pipeline.partition import inputs_in_flight

_NO_REPORTS = 2**31 - 1
"""Steps between DeepSpeed's own reports to disable them; its pipeline engine does not accept null."""
_PROFILER, _PROFILE = "flops_profiler", "flops-profile.txt"
_PIPELINE, _PARTITIONED = "pipeline", ("pipe_partitioned", "grad_partitioned")


def compile_config(run: RunConfig, provided: Mapping[str, Provided], file: Mapping[str, Any]) -> dict[str, Any]:
    """The finished config for ``deepspeed.initialize``: everything in the file, completed from the run.

    Args:
        run: the resolved run, whose batch sizes agree.
        provided: what the user provided, which is written even if DeepSpeed does not need it.
        file: tree of the config file, or an empty one. It is not changed.

    The optimizer section asks for torch's AdamW unless the step is offloaded or the file names another
    optimizer. The engine replaces it by apex's if --fused-kernels allows it.
    """
    tree = copy.deepcopy(dict(file))
    optimizer = tree.setdefault("optimizer", {})
    optimizer["type"] = optimizer_name(optimizer.get("type", DEFAULT_OPTIMIZER))
    params = optimizer.setdefault("params", {})
    known = OPTIMIZERS[optimizer["type"]].params
    if "betas" in known:
        params.setdefault("betas", [run.optim.adam_beta1, run.optim.adam_beta2])
    write_settings(tree, run, provided)
    if "torch_adam" in known:
        params.setdefault("torch_adam", run.zero.cpu_torch_adam or not run.zero.offloads_optimizer)
        if params["torch_adam"]:
            params.setdefault("fused", True)  # one kernel for the whole step, on the CPU as well
    _complete_pipeline(tree, run.parallel)
    _complete_profiler(tree, run.observe)
    if run.activation.contiguous_checkpointing and tree[RECOMPUTE].get("number_checkpoints") is None:
        in_flight = inputs_in_flight(run) if run.parallel.uses_pipeline else run.model.num_layers
        tree[RECOMPUTE]["number_checkpoints"] = in_flight
    if tree.get("steps_per_print") is None:
        tree["steps_per_print"] = run.logging.log_interval if run.logging.verbose else _NO_REPORTS
    tree.setdefault("wall_clock_breakdown", False)
    return tree


def _complete_pipeline(tree: dict[str, Any], parallel: ParallelConfig) -> None:
    """Disable partitioned sends if the run does not support them."""
    if _whole_tensors(parallel):
        tree.setdefault(_PIPELINE, {}).update(dict.fromkeys(_PARTITIONED, False))


def _complete_profiler(tree: dict[str, Any], observe: ObserveConfig) -> None:
    """Write the profiler's section if its flag is set. DeepSpeed counts steps from 0."""
    if observe.flops_profile_step is not None:
        tree[_PROFILER] = {
            "enabled": True,
            "profile_step": observe.flops_profile_step - 1,
            "output_file": str(Path(str(observe.profile_dir)) / _PROFILE),
        }


def conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> list[str]:
    """A message for each key of a config file that does not fit the run."""
    return [
        *_optimizer_conflicts(run, file, provided),
        *_pipeline_conflicts(run.parallel, file),
        *_profiler_conflicts(run.observe, file),
    ]


def _optimizer_conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> list[str]:
    name = optimizer_name(file.get("optimizer", {}).get("type", DEFAULT_OPTIMIZER)) or DEFAULT_OPTIMIZER
    optimizer = OPTIMIZERS[name]
    problems = []
    if run.zero.zero_stage > 0 and not optimizer.tested_with_zero and not file.get("zero_allow_untested_optimizer"):
        problems.append(
            f"optimizer {name} is untested with ZeRO: use AdamW, --zero-stage 0, "
            'or "zero_allow_untested_optimizer": true'
        )
    if optimizer.needs_gpu and run.parallel.device == "cpu" and not run.zero.offloads_optimizer:
        problems.append(f"optimizer {name} needs a GPU, and this host has none: use AdamW")
    for field, param in (("adam_beta1", "betas"), ("adam_beta2", "betas"), ("adam_eps", "eps")):
        if field in provided and param not in optimizer.params:
            problems.append(f"{provided[field].source} has no effect on optimizer {name}: remove it")
    return problems


def _pipeline_conflicts(parallel: ParallelConfig, file: Mapping[str, Any]) -> list[str]:
    cause, section = _whole_tensors(parallel), file.get(_PIPELINE, {})
    return [
        f"{_PIPELINE}.{key} true cannot be combined with {cause}: set it to false, or remove it"
        for key in _PARTITIONED
        if cause and section.get(key)
    ]


def _whole_tensors(parallel: ParallelConfig) -> str | None:
    """Why tensors between stages must not be partitioned over the tensor-parallel ranks; None if they may be."""
    if not parallel.uses_pipeline:
        return None
    if parallel.sequence_parallel:
        return "--sequence-parallel, by which no two tensor-parallel ranks send the same tensor"
    if parallel.uses_dualpipev:
        return f"--pipeline-schedule {parallel.pipeline_schedule}, whose engine sends whole tensors only"
    return None


def _profiler_conflicts(observe: ObserveConfig, file: Mapping[str, Any]) -> list[str]:
    if observe.flops_profile_step is not None and _PROFILER in file:
        return [f"--flops-profile-step and {_PROFILER} in the JSON exclude each other: remove one"]
    return []
