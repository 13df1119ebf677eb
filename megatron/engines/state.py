"""Access to the state of DeepSpeed's engines and optimizers for checkpoints.

The base optimizer updates *fp32 master weights*: the parameters themselves, copies of them, or flat tensors of many
parameters, which ZeRO partitions over the data-parallel ranks.

Adam's step count is a tensor per parameter in torch, a number per parameter in DeepSpeed, and a number per parameter
group in apex's FusedAdam. The moments have the same names in all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megatron.engines.overrides import replaced
from megatron.engines.pipelined_model import PipelinedModel


def save_state(
    engine: DeepSpeedEngine, files: CheckpointEngine, folder: Path, client_state: dict[str, Any], *, optimizer: bool
) -> None:
    """Save the state of this rank and ``client_state`` into ``folder`` with DeepSpeed, using ``files`` for writing.

    The file ``latest`` is not changed. Without ``optimizer`` no ZeRO optimizer shards are written.

    DeepSpeed: runtime/engine.py, ``save_checkpoint`` has no option to omit optimizer shards. For a model with experts
    it expects its own MoE class, counts layers from each pipeline stage on, and writes no optimizer state at ZeRO 0.
    Tests: tests/checkpoint/test_checkpoint_files.py (``--no-save-optim``), tests/training/test_moe_layouts_agree.py.
    """
    engine.settle()
    changes: dict[str, Any] = {"checkpoint_engine": files, "has_moe_layers": False}
    if not optimizer:
        changes["save_zero_checkpoint"] = False
    with replaced(engine, **changes):
        engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=client_state, save_latest=False)


def optimizer_name(optimizer: Optimizer) -> str:
    """Package and class of ``optimizer``, such as ``torch AdamW`` or ``apex FusedAdam``."""
    return f"{_package(optimizer)} {type(optimizer).__name__}"


def parameter_shapes(engine: DeepSpeedEngine) -> list[dict[str, torch.Size]]:
    """Names and shapes of the parameters in each parameter group, in the optimizer's order; for ZeRO 0."""
    groups = [group["params"] for group in engine.optimizer.param_groups]
    return [{engine.param_names[parameter]: parameter.shape for parameter in group} for group in groups]


def parameter_states(engine: DeepSpeedEngine) -> dict[str, dict[str, Any]]:
    """Parameter name to its optimizer state, with the step count; for ZeRO 0."""
    states: dict[str, dict[str, Any]] = {}
    for group in engine.optimizer.param_groups:
        step = {"step": group["step"]} if "step" in group else {}
        for parameter in group["params"]:
            states[engine.param_names[parameter]] = {**step, **engine.optimizer.state[parameter]}
    return states


def restore_progress(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore the learning-rate schedule and the counters from the state that DeepSpeed saved for a rank."""
    engine.settle()
    engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
    engine.global_steps = saved["global_steps"]
    engine.global_samples = saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]


def restore_loss_scale(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore the loss scale if both runs use dynamic loss scaling; otherwise the flags determine it."""
    source = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
    if saved.get("dynamic_loss_scale") and getattr(engine.optimizer, "dynamic_loss_scale", False):
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if name in source:
                setattr(engine.optimizer.loss_scaler, name, source[name])


class RankFile(NamedTuple):
    """A checkpoint file that DeepSpeed loads on a rank, and the state that the engine would save in it now."""

    path: Path
    weights: Mapping[str, Mapping[str, Any]]
    """Entry of the file to its names and tensors; the entry "" is the entire file."""
    optimizer: Mapping[str, Mapping[str, Any]]
    """Entry with the optimizer state, if it is loaded from this file; see ``base_tensors``."""


def rank_files(engine: DeepSpeedEngine, folder: Path, *, optimizer: bool) -> list[RankFile]:
    """The files of the checkpoint ``folder`` that DeepSpeed loads on this rank, with the ``optimizer`` or without."""
    module, place = engine.module, (str(folder.parent), folder.name)
    weights: dict[str, Mapping[str, Any]] = {}
    files = []
    if isinstance(module, PipelinedModel):
        layers = module.layer_files(folder)
        files = [RankFile(path, {"": layer.state_dict(keep_vars=True)}, {}) for path, layer in layers]
    else:
        weights["module"] = module.state_dict(keep_vars=True)
    frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
    if frozen and engine.zero_optimization_partition_weights():
        weights["frozen_param_fragments"] = {name: nn.Parameter(p.ds_tensor, False) for name, p in frozen.items()}
    loads_zero = optimizer and engine.zero_optimization() and not engine.zero_nvme_offload_optimizer()
    if loads_zero:
        state = {"optimizer_state_dict": engine.optimizer.state_dict()}
        files.append(RankFile(Path(engine._get_zero_ckpt_name(*place)), {}, state))
    state = {"optimizer": engine.optimizer.state_dict()} if optimizer and not engine.zero_optimization() else {}
    return [RankFile(Path(engine._get_ckpt_name(*place)), weights, state), *files]


def base_tensors(engine: DeepSpeedEngine) -> list[Tensor]:
    """The tensors that the base optimizer updates, in the order of the indices in its state."""
    attribute = next((name for name in _WRAPPERS if hasattr(engine.optimizer, name)), None)
    if attribute is not None:
        return list(getattr(engine.optimizer, attribute))
    return [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]


def moment_names(optimizer: Optimizer, tensor: Tensor) -> set[str]:
    """The names of the state (moments) that ``optimizer`` keeps for a parameter, or for the tensor that it updates."""
    kind = type(optimizer).__name__.lower()
    return next((names(optimizer, tensor) for part, names in _MOMENTS.items() if part in kind), set())


_MOMENTS: dict[str, Callable[[Any, Tensor], set[str]]] = {
    "adam": lambda *_: {"exp_avg", "exp_avg_sq"},
    "lamb": lambda *_: {"exp_avg", "exp_avg_sq"},
    "lion": lambda *_: {"exp_avg"},
    "muon": lambda muon, tensor: {"momentum_buffer"} if muon.is_matrix(tensor) else {"exp_avg", "exp_avg_sq"},
    "sgd": lambda sgd, _: {"momentum_buffer"} if sgd.defaults["momentum"] else set(),
    "cpuadagrad": lambda *_: {"exp_avg_sq"},
    "adagrad": lambda *_: {"sum"},
    "adafactor": lambda _, tensor: {"row_var", "col_var"} if tensor.dim() > 1 else {"variance"},
}
"""Part of an optimizer's class name to its moments."""


@contextmanager
def optimizer_notified(engine: DeepSpeedEngine) -> Iterator[None]:
    """A context for loading optimizer state, which notifies the ZeRO 3 optimizer before and after."""
    getattr(engine.optimizer, "checkpoint_event_prologue", lambda: None)()
    yield
    getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()


def accept_any_adam(optimizer: Optimizer) -> None:
    """Let ``optimizer`` load the state of any other implementation of Adam.

    Otherwise torch's raises KeyError: 'step' for apex's state, and apex's counts from 0 again for torch's state.
    """
    optimizer.register_load_state_dict_pre_hook(in_form_of)


def in_form_of(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state ``saved`` by any implementation of Adam to the form of ``optimizer``.

    State without a step count stays as it is. Earlier versions saved Adagrad's groups of ZeRO as a single one.
    """
    groups = [dict(group) for group in saved["param_groups"]]
    if len(groups) == 1:
        numbers = iter(groups[0]["params"])
        divided = [list(islice(numbers, len(current["params"]))) for current in optimizer.param_groups]
        groups = [{**groups[0], "params": params} for params in divided]
    state = {number: dict(values) for number, values in saved["state"].items()}
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        numbered = zip(group["params"], current["params"], strict=True)
        states = [(state[number], parameter) for number, parameter in numbered if number in state]
        counts = [values["step"] for values, _ in states if "step" in values]
        group_count = group.pop("step", None)
        count = counts[0] if counts else group_count  # DeepSpeed's FusedAdam also has one in the group, always 0
        if count is None:
            continue
        if _counts_by_group(optimizer):
            group["step"] = int(count)
        for values, parameter in states:
            steps = values.pop("step", count)
            if not _counts_by_group(optimizer):
                values["step"] = _count(optimizer, parameter, steps)
    return {**saved, "param_groups": groups, "state": state}


def set_step(optimizer: Optimizer, parameter: Tensor, steps: float) -> None:
    """Set the step count of ``parameter``."""
    if _counts_by_group(optimizer):
        for group in optimizer.param_groups:
            group["step"] = int(steps)
    else:
        optimizer.state[parameter]["step"] = _count(optimizer, parameter, steps)


def _count(optimizer: Optimizer, parameter: Tensor, steps: float | Tensor) -> int | Tensor:
    if _package(optimizer) != "torch":
        return int(steps)
    # Fused kernels read the step count on the device of the weights.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.tensor(float(steps), device=parameter.device if on_device else "cpu")


def _counts_by_group(optimizer: Optimizer) -> bool:
    return _package(optimizer) == "apex"


def _package(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.split(".")[0]


class MasterWeight(NamedTuple):
    """Elements ``begin`` to ``begin + length`` of a parameter, stored at ``start`` in ``tensor``, both flattened."""

    tensor: Tensor
    start: int
    begin: int
    length: int


MasterWeights = Iterator[tuple[nn.Parameter, MasterWeight]]


def master_weights(engine: DeepSpeedEngine) -> dict[nn.Parameter, MasterWeight]:
    """The fp32 master weights of the parameters of which this rank's optimizer has a part."""
    for attribute, read in _WRAPPERS.items():
        if hasattr(engine.optimizer, attribute):
            return dict(read(engine.optimizer))
    parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    return dict(_flat([[parameter] for parameter in parameters], parameters))


def _zero3(optimizer: Any) -> MasterWeights:
    """Master weights at ZeRO 3: an equal part of each parameter per rank; the last part may contain padding."""
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            begin = length * dist.get_rank(parameter.ds_process_group)
            length = min(length, parameter.ds_numel - begin)
            if length > 0:
                yield parameter, MasterWeight(master, start, begin, length)


def zero_master_weights(optimizer: Any) -> MasterWeights:
    """The master weights of a ZeRO 1 or 2 optimizer."""
    # Does not use DeepSpeed's links between parameters and masters: their order is wrong with round-robin gradients.
    groups, masters = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
    return _flat(groups, masters, optimizer.real_dp_process_group, optimizer.round_robin_bit16_offsets)


def _flat(
    groups: Sequence[Sequence[nn.Parameter]],
    masters: Sequence[Tensor],
    data_groups: Sequence[ProcessGroup] | None = None,
    offsets: Sequence[Sequence[int]] | None = None,
) -> MasterWeights:
    """Master weights in a flat tensor per group, of which each rank of ``data_groups`` has an equal part.

    Parameters begin at ``offsets`` in the flat tensor; by default they are consecutive.
    """
    for number, (group, master) in enumerate(zip(groups, masters, strict=True)):
        part = dist.get_rank(data_groups[number]) * master.numel() if data_groups else 0
        begins = offsets[number] if offsets else accumulate((p.numel() for p in group), initial=0)
        for parameter, offset in zip(group, begins, strict=False):
            begin = max(part - offset, 0)
            end = min(part + master.numel() - offset, parameter.numel())
            if begin < end:
                yield parameter, MasterWeight(master, offset + begin - part, begin, end - begin)


def own_weights(parameter: Any) -> MasterWeight | None:
    """This rank's part of a parameter partitioned by ZeRO 3; None if it is not partitioned at the moment."""
    if getattr(parameter, "ds_status", None) is not ZeroParamStatus.NOT_AVAILABLE:
        return None
    part = parameter.ds_tensor
    if part.status is not PartitionedParamStatus.AVAILABLE or parameter.ds_secondary_tensor is not None:
        return None
    begin = part.ds_numel * dist.get_rank(parameter.ds_process_group)
    return MasterWeight(part, 0, begin, max(min(part.ds_numel, parameter.ds_numel - begin), 0))


_WRAPPERS: dict[str, Callable[[Any], MasterWeights]] = {
    "fp32_partitioned_groups_flat": _zero3,
    "single_partition_of_fp32_groups": zero_master_weights,
}
"""Attribute that identifies a DeepSpeed optimizer wrapper to a function that reads its master weights.

In fp32 at ZeRO 0 there is no wrapper.
"""
