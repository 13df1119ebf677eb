"""One DeepSpeed config out of flags and a JSON file: the one source of truth that DeepSpeed is started with.

Settings that exist in both worlds are *knobs*. A knob that only the file sets fills the run's field;
one that only the command line sets is written into the config; one that both set must be the same.
What only the file knows is passed on as it is.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.config.deepspeed_json.file import ConfigFile
from megatron.config.deepspeed_json.sections import (
    DEFAULT_OPTIMIZER,
    OPTIMIZERS,
    complete_offload,
    complete_pipeline,
    complete_profile,
    optimizer_name,
    shared_offload_settings,
)
from megatron.config.fields import Provided
from megatron.parallel.pipeline.partition import inputs_in_flight

_NEVER = 2**31 - 1
"""Steps between DeepSpeed's own reports when nobody wants them. Its pipeline engine cannot do with null."""


def _same(value: Any) -> Any:
    return value


def _always(run: RunConfig) -> bool:
    return True


def _in_fp16(run: RunConfig) -> bool:
    return run.precision.fp16


def _with_zero(run: RunConfig) -> bool:
    return run.zero.zero_stage > 0


def _recomputing(run: RunConfig) -> bool:
    return run.activation.checkpoint_activations


class Knob(NamedTuple):
    """A setting with a flag and a place in the JSON."""

    section: str
    field: str
    key: tuple[str | int, ...]
    """Where it stands in the JSON; a number is a place in a list."""
    written: Callable[[RunConfig], bool] = _always
    """Whether it goes into the config although the user did not give it."""
    read: Callable[[Any], Any] = _same
    """From the JSON's value to the field's."""
    write: Callable[[Any], Any] = _same
    """From the field's value to the JSON's; None leaves it to DeepSpeed."""

    @property
    def name(self) -> str:
        """The place in the JSON as one writes it in a message."""
        return ".".join(part for part in self.key if isinstance(part, str))


def _read_loss_scale(scale: float) -> float | None:
    return float(scale) if scale else None


def _power_of_two(scale: float) -> int:
    return round(math.log2(scale))


def _true_or_silent(value: bool) -> bool | None:
    return value or None


def _device_or_silent(device: str) -> str | None:
    return None if device == "none" else device


_ZERO = "zero_optimization"
_RECOMPUTE = "activation_checkpointing"
_PARAMS = ("optimizer", "params")

KNOBS: tuple[Knob, ...] = (
    Knob("train", "global_batch_size", ("train_batch_size",), read=int),
    Knob("train", "micro_batch_size", ("train_micro_batch_size_per_gpu",), read=int),
    Knob("train", "gradient_accumulation_steps", ("gradient_accumulation_steps",), read=int),
    Knob("optim", "clip_grad", ("gradient_clipping",), read=float),
    Knob("precision", "fp16", ("fp16", "enabled"), write=_true_or_silent),
    Knob("precision", "loss_scale", ("fp16", "loss_scale"), _in_fp16, _read_loss_scale, lambda scale: scale or 0),
    Knob(
        "precision",
        "initial_loss_scale",
        ("fp16", "initial_scale_power"),
        _in_fp16,
        lambda power: 2.0**power,
        _power_of_two,
    ),
    Knob("precision", "loss_scale_window", ("fp16", "loss_scale_window"), _in_fp16, int),
    Knob("precision", "hysteresis", ("fp16", "hysteresis"), _in_fp16, int),
    Knob("precision", "min_scale", ("fp16", "min_loss_scale"), _in_fp16, write=int),
    Knob("precision", "bf16", ("bf16", "enabled"), write=_true_or_silent),
    Knob(
        "precision",
        "fp32_allreduce",
        ("communication_data_type",),
        read=lambda dtype: dtype == "fp32",
        write=lambda wanted: "fp32" if wanted else None,
    ),
    Knob("precision", "grad_accum_dtype", ("data_types", "grad_accum_dtype")),
    Knob("zero", "zero_stage", (_ZERO, "stage"), read=int),
    Knob("zero", "zero_reduce_scatter", (_ZERO, "reduce_scatter"), _with_zero),
    Knob("zero", "zero_contiguous_gradients", (_ZERO, "contiguous_gradients"), _with_zero),
    Knob("zero", "zero_reduce_bucket_size", (_ZERO, "reduce_bucket_size"), _with_zero, float, lambda n: int(n) or None),
    Knob(
        "zero",
        "zero_allgather_bucket_size",
        (_ZERO, "allgather_bucket_size"),
        _with_zero,
        float,
        lambda n: int(n) or None,
    ),
    Knob("zero", "zero_overlap_comm", (_ZERO, "overlap_comm"), _with_zero),
    Knob("zero", "zero_round_robin_gradients", (_ZERO, "round_robin_gradients"), write=_true_or_silent),
    Knob("zero", "offload_optimizer", (_ZERO, "offload_optimizer", "device"), write=_device_or_silent),
    Knob("zero", "offload_param", (_ZERO, "offload_param", "device"), write=_device_or_silent),
    Knob("activation", "partition_activations", (_RECOMPUTE, "partition_activations"), _recomputing),
    Knob("activation", "contiguous_checkpointing", (_RECOMPUTE, "contiguous_memory_optimization"), _recomputing),
    Knob("activation", "checkpoint_in_cpu", (_RECOMPUTE, "cpu_checkpointing"), _recomputing),
    Knob("activation", "synchronize_each_layer", (_RECOMPUTE, "synchronize_checkpoint_boundary"), _recomputing),
    Knob("activation", "profile_backward", (_RECOMPUTE, "profile"), _recomputing),
    Knob("optim", "lr", (*_PARAMS, "lr"), read=float),
    Knob("optim", "adam_beta1", (*_PARAMS, "betas", 0), read=float),
    Knob("optim", "adam_beta2", (*_PARAMS, "betas", 1), read=float),
    Knob("optim", "adam_eps", (*_PARAMS, "eps"), read=float),
    Knob("optim", "weight_decay", (*_PARAMS, "weight_decay"), read=float),
)


def read_knobs(file: ConfigFile) -> dict[str, Provided]:
    """What the file says of the knobs, by field."""

    def said(name: str, value: Any) -> str:
        return f"{name} {json.dumps(value)} in {file.path}"

    given = {
        knob.field: Provided(knob.read(value), said(knob.name, value))
        for knob in KNOBS
        if (value := _get(file.tree, knob.key)) is not None
    }
    torch_adam = _get(file.tree, (*_PARAMS, "torch_adam"))
    offloads = "offload_optimizer" in given and given["offload_optimizer"].value != "none"
    # On the device torch's Adam is the rule; only an offloaded step has a flag for it.
    if torch_adam is False or (torch_adam and offloads):
        given["cpu_torch_adam"] = Provided(torch_adam, said("optimizer.params.torch_adam", torch_adam))
    for field, section, key in shared_offload_settings(file.tree):
        name, value = f"{_ZERO}.{section}.{key}", file.tree[_ZERO][section][key]
        given[field] = Provided(value, said(name, value))
    return given


def _get(tree: Any, key: tuple[str | int, ...]) -> Any:
    """The value at ``key``, or None where the tree does not go so far."""
    for part in key:
        if isinstance(part, str) and part not in tree:
            return None
        tree = tree[part]
    return tree


def compile_config(run: RunConfig, given: Mapping[str, Provided], file: Mapping[str, Any]) -> dict[str, Any]:
    """The finished config for ``deepspeed.initialize``: all that the file says, and what it left to the run.

    Args:
        run: the resolved run, whose batch sizes agree.
        given: what was given for it, so that flags are written even where they do not matter.
        file: tree of the config file, or an empty one. It is not changed.

    The optimizer section asks for torch's AdamW unless the step is offloaded or the file wishes
    otherwise. It is the engine that puts apex's in its place, where --fused-kernels allows it.
    """
    tree = copy.deepcopy(dict(file))
    optimizer = tree.setdefault("optimizer", {})
    optimizer["type"] = optimizer_name(optimizer.get("type", DEFAULT_OPTIMIZER))
    params = optimizer.setdefault("params", {})
    known = OPTIMIZERS[optimizer["type"]].params
    if "betas" in known:
        params.setdefault("betas", [run.optim.adam_beta1, run.optim.adam_beta2])
    for knob in KNOBS:
        of_other_optimizer = knob.key[:2] == _PARAMS and knob.key[2] not in known
        if not of_other_optimizer and (knob.written(run) or knob.field in given) and _get(tree, knob.key) is None:
            _set(tree, knob.key, knob.write(getattr(getattr(run, knob.section), knob.field)))
    if "torch_adam" in known:
        params.setdefault("torch_adam", run.zero.cpu_torch_adam or not run.zero.offloads_optimizer)
        if params["torch_adam"]:
            params.setdefault("fused", True)  # one kernel for the whole step, on the CPU as well
    complete_offload(tree, run.zero)
    complete_pipeline(tree, run.parallel)
    complete_profile(tree, run.observe)
    if run.activation.contiguous_checkpointing and tree[_RECOMPUTE].get("number_checkpoints") is None:
        in_flight = inputs_in_flight(run) if run.parallel.uses_pipeline else run.model.num_layers
        tree[_RECOMPUTE]["number_checkpoints"] = in_flight
    if tree.get("steps_per_print") is None:
        tree["steps_per_print"] = run.logging.log_interval if run.logging.verbose else _NEVER
    tree.setdefault("wall_clock_breakdown", False)
    return tree


def _set(tree: Any, key: tuple[str | int, ...], value: Any) -> None:
    if value is None:
        return
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
    tree[key[-1]] = value


def describe(run: RunConfig) -> str:
    """The finished DeepSpeed config as JSON, to be printed and saved with the run."""
    return json.dumps(run.ds_config, indent=2)
