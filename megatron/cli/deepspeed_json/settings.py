"""The settings that have both a flag and a key in DeepSpeed's config, and how their values are converted."""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.cli.deepspeed_json.file import DEFAULT_OPTIMIZER, MAX_GRAD_NORM, ConfigFile
from megatron.cli.provided import Provided
from megatron.config import RunConfig

KeyPath = tuple[str | int, ...]
"""Where a value is in a config; a number is an index of a list."""

ZERO, RECOMPUTE, PARAMS = "zero_optimization", "activation_checkpointing", ("optimizer", "params")
_TYPES = {"adam": DEFAULT_OPTIMIZER, "sgd": "SGD"}
"""Values of --optimizer whose key of OPTIMIZERS is another word than the value itself."""


def _same(value: Any) -> Any:
    return value


def _or_default(value: Any) -> Any:
    return value or None


def _optimizer_flag(type_: str) -> str:
    """The value of --optimizer for an "optimizer.type"; AdamW is what ``adam`` means, and Adam the same by default."""
    return type_.lower().replace("adamw", "adam")


def optimizer_type(name: str) -> str:
    """The key of OPTIMIZERS for a value of --optimizer."""
    return _TYPES.get(name, name.title())


def _size_or_default(size: float) -> int | None:
    return int(size) or None


class Setting(NamedTuple):
    """A setting with a flag and a key."""

    field: str
    key: KeyPath
    read: Callable[[Any], Any] = _same
    """Converts the JSON value to the field's."""
    write: Callable[[Any], Any] = _same
    """Converts the field's value to the JSON value; None is left to DeepSpeed."""
    allowed: Callable[[RunConfig], bool] = lambda run: True
    """Whether it may be written at all."""
    optimizer: str | None = None
    """The optimizer, as in --optimizer, without which the key is of another setting."""

    @property
    def name(self) -> str:
        """The key as messages quote it."""
        return ".".join(part for part in self.key if isinstance(part, str))


def _offload_settings(offload: str) -> list[Setting]:
    """Settings of the section ``offload``. The two offload sections share their flags."""
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
    Setting("fp16", ("fp16", "enabled"), write=_or_default),
    # A static scale of 0 asks for a dynamic one.
    Setting("loss_scale", ("fp16", "loss_scale"), lambda x: float(x) or None, lambda x: x or 0),
    Setting(
        "initial_loss_scale",
        ("fp16", "initial_scale_power"),
        read=lambda power: 2.0**power,
        write=lambda scale: round(math.log2(scale)),
    ),
    Setting("loss_scale_window", ("fp16", "loss_scale_window"), int),
    Setting("hysteresis", ("fp16", "hysteresis"), int),
    Setting("min_scale", ("fp16", "min_loss_scale"), write=int),
    Setting("bf16", ("bf16", "enabled"), write=_or_default),
    Setting(
        "fp32_allreduce",
        ("communication_data_type",),
        read=lambda dtype: dtype == "fp32",
        write=lambda enabled: "fp32" if enabled else None,
    ),
    Setting("grad_accum_dtype", ("data_types", "grad_accum_dtype")),
    Setting("zero_stage", (ZERO, "stage"), read=int),
    Setting("zero_reduce_scatter", (ZERO, "reduce_scatter")),
    Setting("zero_contiguous_gradients", (ZERO, "contiguous_gradients")),
    Setting("zero_reduce_bucket_size", (ZERO, "reduce_bucket_size"), float, _size_or_default),
    Setting("zero_allgather_bucket_size", (ZERO, "allgather_bucket_size"), float, _size_or_default),
    Setting("zero_overlap_comm", (ZERO, "overlap_comm")),
    Setting("zero_round_robin_gradients", (ZERO, "round_robin_gradients"), write=_or_default),
    *_offload_settings("offload_optimizer"),
    *_offload_settings("offload_param"),
    Setting("partition_activations", (RECOMPUTE, "partition_activations")),
    Setting("contiguous_checkpointing", (RECOMPUTE, "contiguous_memory_optimization")),
    Setting("checkpoint_in_cpu", (RECOMPUTE, "cpu_checkpointing")),
    Setting("synchronize_each_layer", (RECOMPUTE, "synchronize_checkpoint_boundary")),
    Setting("profile_backward", (RECOMPUTE, "profile")),
    Setting("optimizer", ("optimizer", "type"), read=_optimizer_flag, write=optimizer_type),
    Setting("lr", (*PARAMS, "lr"), read=float),
    Setting("adam_beta1", (*PARAMS, "betas", 0), read=float),
    Setting("adam_beta2", (*PARAMS, "betas", 1), read=float),
    Setting("adam_eps", (*PARAMS, "eps"), read=float),
    Setting("weight_decay", (*PARAMS, "weight_decay"), read=float),
    Setting("sgd_momentum", (*PARAMS, "momentum"), read=float, optimizer="sgd"),
    Setting("muon_momentum", (*PARAMS, "momentum"), read=float, optimizer="muon"),
)


def read_settings(file: ConfigFile) -> dict[str, Provided]:
    """The settings that ``file`` provides, by field. Of two keys with one field, the last one counts."""

    def provided(name: str, value: Any, read: Callable[[Any], Any] = _same) -> Provided:
        return Provided(read(value), f"{name} {json.dumps(value)} in {file.path}")

    optimizer = value_at(file.tree, ("optimizer", "type"))
    settings = {
        setting.field: provided(setting.name, value, setting.read)
        for setting in SETTINGS
        if (value := value_at(file.tree, setting.key)) is not None
        and setting.optimizer in (None, optimizer and _optimizer_flag(optimizer))
    }
    torch_adam = value_at(file.tree, (*PARAMS, "torch_adam"))
    offloads = "offload_optimizer" in settings and settings["offload_optimizer"].value != "none"
    # Without offload torch's Adam is the default; the flag is for an offloaded step only.
    if torch_adam is False or (torch_adam and offloads):
        settings["cpu_torch_adam"] = provided("optimizer.params.torch_adam", torch_adam)
    return settings


def value_at(tree: Any, key: KeyPath) -> Any:
    """The value at ``key``, or None if the tree has none."""
    for part in key:
        if isinstance(part, str) and part not in tree:
            return None
        tree = tree[part]
    return tree
