"""Compiles flags and a DeepSpeed JSON file (see ``file``) into the DeepSpeed config of a run.

A setting with both a flag and a JSON key may be provided in either place; if in both, the values must be equal.
Keys without a flag are passed on unchanged.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.cli.deepspeed_json.file import DEFAULT_OPTIMIZER, MAX_GRAD_NORM, OPTIMIZERS, optimizer_name
from megatron.cli.provided import Provided
from megatron.config import RunConfig, flag_value
from megatron.model.partition import inputs_in_flight

KeyPath = tuple[str | int, ...]
"""Path of a value in a config; an integer is a list index."""

ZERO, RECOMPUTE, PARAMS = "zero_optimization", "activation_checkpointing", ("optimizer", "params")


def _optimizer_flag(type_: str) -> str:
    """The value of --optimizer for an "optimizer.type": ``adam`` for both Adam and AdamW."""
    return type_.lower().replace("adamw", "adam")


class Setting(NamedTuple):
    """A setting with both a flag and a key in the DeepSpeed JSON."""

    field: str
    key: KeyPath
    read: Callable[[Any], Any] = lambda value: value
    """Converts the JSON value to the value of the field."""
    write: Callable[[Any], Any] = lambda value: value
    """Converts the value of the field to the JSON value; None omits the key."""
    allowed: Callable[[RunConfig], bool] = lambda run: True
    """Whether the key may be written for this run."""
    optimizer: str | None = None
    """The value of --optimizer for which the key has this meaning; None for all."""


def _offload_settings(offload: str) -> list[Setting]:
    """The settings of the section ``offload``: offload_optimizer or offload_param, which share their flags."""
    return [
        Setting(offload, (ZERO, offload, "device"), write=lambda device: None if device == "none" else device),
        Setting("nvme_path", (ZERO, offload, "nvme_path"), allowed=lambda run: getattr(run.zero, offload) == "nvme"),
        Setting(
            "offload_pin_memory",
            (ZERO, offload, "pin_memory"),
            write=lambda pinned: None if pinned else False,
            allowed=lambda run: getattr(run.zero, offload) != "none",
        ),
    ]


SETTINGS: tuple[Setting, ...] = (
    Setting("global_batch_size", ("train_batch_size",), read=int),
    Setting("micro_batch_size", ("train_micro_batch_size_per_gpu",), read=int),
    Setting("gradient_accumulation_steps", ("gradient_accumulation_steps",), read=int),
    Setting("clip_grad", (*PARAMS, MAX_GRAD_NORM), read=float, allowed=lambda run: False),
    Setting("clip_grad", ("gradient_clipping",), read=float),
    Setting("fp16", ("fp16", "enabled"), write=lambda on: on or None),
    # In DeepSpeed a static scale of 0 selects dynamic scaling.
    Setting("loss_scale", ("fp16", "loss_scale"), lambda x: float(x) or None, lambda x: x or 0),
    Setting("initial_loss_scale", ("fp16", "initial_scale_power"), lambda x: 2.0**x, lambda x: round(math.log2(x))),
    Setting("loss_scale_window", ("fp16", "loss_scale_window"), int),
    Setting("hysteresis", ("fp16", "hysteresis"), int),
    Setting("min_scale", ("fp16", "min_loss_scale"), write=int),
    Setting("bf16", ("bf16", "enabled"), write=lambda on: on or None),
    Setting("fp32_allreduce", ("communication_data_type",), lambda x: x == "fp32", lambda on: "fp32" if on else None),
    Setting("grad_accum_dtype", ("data_types", "grad_accum_dtype")),
    Setting("zero_stage", (ZERO, "stage"), read=int),
    Setting("zero_reduce_scatter", (ZERO, "reduce_scatter")),
    Setting("zero_contiguous_gradients", (ZERO, "contiguous_gradients")),
    Setting("zero_reduce_bucket_size", (ZERO, "reduce_bucket_size"), float, lambda size: int(size) or None),
    # DeepSpeed 0.19.8 asserts an even number.
    Setting(
        "zero_allgather_bucket_size", (ZERO, "allgather_bucket_size"), float, lambda n: 2 * math.ceil(n / 2) or None
    ),
    Setting("zero_overlap_comm", (ZERO, "overlap_comm")),
    Setting("zero_round_robin_gradients", (ZERO, "round_robin_gradients"), write=lambda on: on or None),
    *_offload_settings("offload_optimizer"),
    *_offload_settings("offload_param"),
    Setting("partition_activations", (RECOMPUTE, "partition_activations")),
    Setting("contiguous_checkpointing", (RECOMPUTE, "contiguous_memory_optimization")),
    Setting("checkpoint_in_cpu", (RECOMPUTE, "cpu_checkpointing")),
    Setting("synchronize_each_layer", (RECOMPUTE, "synchronize_checkpoint_boundary")),
    Setting("profile_backward", (RECOMPUTE, "profile")),
    Setting("optimizer", ("optimizer", "type"), read=_optimizer_flag),
    Setting("lr", (*PARAMS, "lr"), read=float),
    Setting("adam_beta1", (*PARAMS, "betas", 0), read=float),
    Setting("adam_beta2", (*PARAMS, "betas", 1), read=float),
    Setting("adam_eps", (*PARAMS, "eps"), read=float),
    Setting("weight_decay", (*PARAMS, "weight_decay"), read=float),
    Setting("sgd_momentum", (*PARAMS, "momentum"), read=float, optimizer="sgd"),
    Setting("muon_momentum", (*PARAMS, "momentum"), read=float, optimizer="muon"),
)


def read_settings(tree: Mapping[str, Any], path: str) -> dict[str, Provided]:
    """The settings in the config ``tree`` from file ``path``, by field. If two keys set a field, the last one wins."""

    def source(key: KeyPath, value: Any) -> str:
        return f"{'.'.join(part for part in key if isinstance(part, str))} {json.dumps(value)} in {path}"

    optimizer = value_at(tree, ("optimizer", "type"))
    settings = {
        setting.field: Provided(setting.read(value), source(setting.key, value))
        for setting in SETTINGS
        if (value := value_at(tree, setting.key)) is not None
        and setting.optimizer in (None, optimizer and _optimizer_flag(optimizer))
    }
    torch_adam = value_at(tree, key := (*PARAMS, "torch_adam"))
    offloads = "offload_optimizer" in settings and settings["offload_optimizer"].value != "none"
    # Without offload torch's Adam is the default; the flag is for an offloaded optimizer only.
    if torch_adam is False or (torch_adam and offloads):
        settings["cpu_torch_adam"] = Provided(torch_adam, source(key, torch_adam))
    return settings


def value_at(tree: Any, key: KeyPath) -> Any:
    """The value at ``key``, or None if the tree has none."""
    for part in key:
        if isinstance(part, str) and part not in tree:
            return None
        tree = tree[part]
    return tree


_NO_REPORTS = 2**31 - 1
"""Steps between DeepSpeed's own reports to disable them; its pipeline engine does not accept null."""
PARTITIONED = ("pipe_partitioned", "grad_partitioned")
ALLOW_UNTESTED = "zero_allow_untested_optimizer"
"""Key that ZeRO requires for optimizers other than Adam and DeepSpeed's own."""
CORRECT_WITH_ZERO = ("SGD", "Lion", "Muon")
"""Optimizers that need ``ALLOW_UNTESTED`` and compute correct updates under ZeRO. Lamb does not."""
FORCE_DEEPSPEED_OPTIMIZER = "zero_force_ds_cpu_optimizer"
"""Key that restricts offloading to DeepSpeed's optimizers. Offloaded Lion is implemented in this project."""


def compile_config(run: RunConfig, provided: Mapping[str, Provided], file: Mapping[str, Any]) -> dict[str, Any]:
    """The config for ``deepspeed.initialize``: everything in the config ``file``, completed with the run's settings.

    Settings in ``provided`` are written even if DeepSpeed does not need them. ``file`` is not modified.

    The optimizer section selects torch's AdamW unless the optimizer is offloaded or --optimizer or the file names
    another one. The engine replaces AdamW with apex's implementation if --fused-kernels allows it.
    """
    tree = copy.deepcopy(dict(file))
    name = run_optimizer(run, file)
    optimizer = tree.setdefault("optimizer", {})
    optimizer["type"] = name
    params = optimizer.setdefault("params", {})
    params.pop(MAX_GRAD_NORM, None)  # written as "gradient_clipping"
    if "betas" in OPTIMIZERS[name]:
        params.setdefault("betas", [run.optim.adam_beta1, run.optim.adam_beta2])
    _write_settings(tree, run, provided)
    if "torch_adam" in OPTIMIZERS[name]:
        params.setdefault("torch_adam", run.zero.cpu_torch_adam or not run.zero.offloads_optimizer)
    is_of_torch = params.get("torch_adam", name == "SGD" or not run.zero.offloads_optimizer)
    if "fused" in OPTIMIZERS[name] and is_of_torch:
        params.setdefault("fused", True)  # one kernel for the step, on the CPU as well, which can also skip it
    else:
        params.pop("fused", None)  # DeepSpeed's optimizers have no choice
    if run.zero.zero_stage > 0 and name in CORRECT_WITH_ZERO:
        tree.setdefault(ALLOW_UNTESTED, True)
    if run.zero.offloads_optimizer and name == "Lion":
        tree[FORCE_DEEPSPEED_OPTIMIZER] = False
    if run.parallel.uses_pipeline:
        tree.setdefault("pipeline", {}).update(dict.fromkeys(PARTITIONED, False))
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
        if not run.logging.verbose:  # the throughput timer synchronizes with the GPU twice per micro-batch
            tree.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    tree.setdefault("wall_clock_breakdown", False)
    return tree


_REPLACED = ("zero_stage", "global_batch_size", "zero_allgather_bucket_size")
"""Fields that replace a value in the file: in half precision stage 0 becomes 1, train_batch_size may be ignored, and an
odd bucket becomes even. All other values in the file already equal those of the run."""


def _write_settings(tree: dict[str, Any], run: RunConfig, provided: Mapping[str, Provided]) -> None:
    """Add to ``tree`` the missing settings of ``run`` that DeepSpeed needs or the user provided."""
    params = OPTIMIZERS[tree["optimizer"]["type"]]
    needed = {
        "fp16": run.precision.fp16,
        ZERO: run.zero.zero_stage > 0,
        RECOMPUTE: run.activation.checkpoint_activations,
    }
    for setting in SETTINGS:
        is_for_another_optimizer = setting.optimizer not in (None, run.optim.optimizer) or (
            setting.key[:2] == PARAMS and setting.key[2] not in params
        )
        required = needed.get(str(setting.key[0]), True) or setting.field in (*provided, "zero_stage")
        missing = value_at(tree, setting.key) is None or setting.field in _REPLACED
        if required and setting.allowed(run) and not is_for_another_optimizer and missing:
            value = setting.write(flag_value(run, setting.field))
            if value is not None:
                *sections, name = setting.key
                section: Any = tree
                for part in sections:
                    section = section.setdefault(part, {})
                section[name] = value


def run_optimizer(run: RunConfig, file: Mapping[str, Any]) -> str:
    """The key of OPTIMIZERS that the file names, or else --optimizer, for which ``adam`` is AdamW."""
    flag = DEFAULT_OPTIMIZER if run.optim.optimizer == "adam" else run.optim.optimizer
    return str(optimizer_name(file.get("optimizer", {}).get("type", flag)))
