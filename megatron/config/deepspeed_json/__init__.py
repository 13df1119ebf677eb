"""Compiles flags and a JSON file into the DeepSpeed config of a run.

A setting with both a flag and a key may be provided in either place; in both, the values must be equal.
Keys without a flag are passed on unchanged.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ParallelConfig, RunConfig
from megatron.config.deepspeed_json.file import DEFAULT_OPTIMIZER, OPTIMIZERS, optimizer_name
from megatron.config.deepspeed_json.settings import RECOMPUTE, write_settings
from megatron.config.fields import Provided
from megatron.parallel.pipeline.partition import inputs_in_flight

_NO_REPORTS = 2**31 - 1
"""Steps between DeepSpeed's own reports to disable them; its pipeline engine does not accept null."""
_PARTITIONED = ("pipe_partitioned", "grad_partitioned")
_UNTESTED_WITH_ZERO = ("Lamb", "SGD")
"""Optimizers that DeepSpeed runs under ZeRO with "zero_allow_untested_optimizer" only."""
_NEED_GPU = ("Lamb", "Lion")
"""Optimizers that are CUDA kernels only, unless they are offloaded."""


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
    known = OPTIMIZERS[optimizer["type"]]
    if "betas" in known:
        params.setdefault("betas", [run.optim.adam_beta1, run.optim.adam_beta2])
    write_settings(tree, run, provided)
    if "torch_adam" in known:
        params.setdefault("torch_adam", run.zero.cpu_torch_adam or not run.zero.offloads_optimizer)
        if params["torch_adam"]:
            params.setdefault("fused", True)  # one kernel for the whole step, on the CPU as well
    if _whole_tensors(run.parallel):
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
        tree["steps_per_print"] = run.logging.log_interval if run.logging.verbose else _NO_REPORTS
    tree.setdefault("wall_clock_breakdown", False)
    return tree


def conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> list[str]:
    """A message for each key of a config file that does not fit the run."""
    problems = _optimizer_conflicts(run, file, provided)
    cause, section = _whole_tensors(run.parallel), file.get("pipeline", {})
    problems += [
        f"pipeline.{key} true cannot be combined with {cause}: set it to false, or remove it"
        for key in _PARTITIONED
        if cause and section.get(key)
    ]
    if run.observe.flops_profile_step is not None and "flops_profiler" in file:
        problems.append("--flops-profile-step and flops_profiler in the JSON exclude each other: remove one")
    return problems


def _optimizer_conflicts(run: RunConfig, file: Mapping[str, Any], provided: Mapping[str, Provided]) -> list[str]:
    name = optimizer_name(file.get("optimizer", {}).get("type", DEFAULT_OPTIMIZER)) or DEFAULT_OPTIMIZER
    problems = []
    if run.zero.zero_stage > 0 and name in _UNTESTED_WITH_ZERO and not file.get("zero_allow_untested_optimizer"):
        problems.append(
            f"optimizer {name} is untested with ZeRO: use AdamW, --zero-stage 0, "
            'or "zero_allow_untested_optimizer": true'
        )
    if name in _NEED_GPU and run.parallel.device == "cpu" and not run.zero.offloads_optimizer:
        problems.append(f"optimizer {name} needs a GPU, and this host has none: use AdamW")
    for field, param in (("adam_beta1", "betas"), ("adam_beta2", "betas"), ("adam_eps", "eps")):
        if field in provided and param not in OPTIMIZERS[name]:
            problems.append(f"{provided[field].source} has no effect on optimizer {name}: remove it")
    return problems


def _whole_tensors(parallel: ParallelConfig) -> str | None:
    """Why tensors between stages must not be partitioned over the tensor-parallel ranks; None if they may be."""
    if not parallel.uses_pipeline:
        return None
    if parallel.sequence_parallel:
        return "--sequence-parallel, by which no two tensor-parallel ranks send the same tensor"
    if parallel.uses_dualpipev:
        return f"--pipeline-schedule {parallel.pipeline_schedule}, whose engine sends whole tensors only"
    return None
