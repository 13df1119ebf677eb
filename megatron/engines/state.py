"""What a checkpoint needs of DeepSpeed's engines and optimizers: their state, under names that do not change.

The base optimizer updates *fp32 master weights*: the parameters themselves, copies of them, or flat tensors of many
parameters, of which ZeRO gives each data-parallel rank a partition.

The step count of Adam is a tensor for each parameter in torch's Adam, a number for each parameter in DeepSpeed's, and
a number for each group of parameters in apex's FusedAdam. The moments have the same names in all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
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
from megatron.engines.pipeline import PipelinedModel


def save_state(
    engine: DeepSpeedEngine, files: CheckpointEngine, folder: Path, client_state: dict[str, Any], *, optimizer: bool
) -> None:
    """Let DeepSpeed save the state of this rank into ``folder`` through ``files``; the file ``latest`` stays as it is.

    ``client_state`` is saved, too. Without ``optimizer`` there are no optimizer shards of ZeRO.

    DeepSpeed: runtime/engine.py, ``save_checkpoint`` has no option for that; and for a model with experts it writes
    files by the names of the modules of its own class, whose layers are counted from each pipeline stage on, and none
    of optimizer states at ZeRO 0.
    Tests: tests/checkpoint/test_checkpoint_files.py (``--no-save-optim``), tests/training/test_moe_layouts_agree.py.
    """
    engine.settle()
    changes: dict[str, Any] = {"checkpoint_engine": files, "has_moe_layers": False}
    if not optimizer:
        changes["save_zero_checkpoint"] = False
    with replaced(engine, **changes):
        engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=client_state, save_latest=False)


def optimizer_name(optimizer: Optimizer) -> str:
    """The implementation of ``optimizer``, such as ``torch AdamW`` or ``apex FusedAdam``."""
    return f"{_package(optimizer)} {type(optimizer).__name__}"


def parameter_shapes(engine: DeepSpeedEngine) -> list[dict[str, torch.Size]]:
    """Name and shape of the parameters in each of the optimizer's groups, in its order; without ZeRO."""
    groups = [group["params"] for group in engine.optimizer.param_groups]
    return [{engine.param_names[parameter]: parameter.shape for parameter in group} for group in groups]


def parameter_states(engine: DeepSpeedEngine) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter by name, with its step count; without ZeRO."""
    states: dict[str, dict[str, Any]] = {}
    for group in engine.optimizer.param_groups:
        step = {"step": group["step"]} if "step" in group else {}
        for parameter in group["params"]:
            states[engine.param_names[parameter]] = {**step, **engine.optimizer.state[parameter]}
    return states


def restore_progress(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore the schedule and the counters from what DeepSpeed saved for a rank."""
    engine.settle()
    engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])
    engine.global_steps = saved["global_steps"]
    engine.global_samples = saved["global_samples"]
    engine.skipped_steps = saved["skipped_steps"]


def restore_loss_scale(engine: DeepSpeedEngine, saved: Mapping[str, Any]) -> None:
    """Restore the loss scale if both runs have a dynamic one; otherwise it starts as the flags specify."""
    source = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
    if saved.get("dynamic_loss_scale") and getattr(engine.optimizer, "dynamic_loss_scale", False):
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if name in source:
                setattr(engine.optimizer.loss_scaler, name, source[name])


class RankFile(NamedTuple):
    """A file of a checkpoint that DeepSpeed loads on a rank, and what the engine would now save in it."""

    path: Path
    weights: Mapping[str, Mapping[str, Any]]
    """Names and tensors of an entry; of the entry "" the whole file."""
    optimizer: Mapping[str, Mapping[str, Any]]
    """The entry with the state of the optimizer, if it is loaded from this file; see ``base_tensors``."""


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
    frozen = {name: one for name, one in module.named_parameters() if not one.requires_grad}
    if frozen and engine.zero_optimization_partition_weights():
        weights["frozen_param_fragments"] = {name: nn.Parameter(one.ds_tensor, False) for name, one in frozen.items()}
    loads_zero = optimizer and engine.zero_optimization() and not engine.zero_nvme_offload_optimizer()
    if loads_zero:
        state = {"optimizer_state_dict": engine.optimizer.state_dict()}
        files.append(RankFile(Path(engine._get_zero_ckpt_name(*place)), {}, state))
    own = {"optimizer": engine.optimizer.state_dict()} if optimizer and not engine.zero_optimization() else {}
    return [RankFile(Path(engine._get_ckpt_name(*place)), weights, own), *files]


def base_tensors(engine: DeepSpeedEngine) -> list[Tensor]:
    """The tensors that the base optimizer updates, in the order in which its state numbers them."""
    attribute = next((name for name in _WRAPPERS if hasattr(engine.optimizer, name)), None)
    if attribute is not None:
        return list(getattr(engine.optimizer, attribute))
    return [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]


def moment_names(optimizer: Optimizer) -> list[set[str]]:
    """The moments that ``optimizer`` keeps of a parameter, or one of several sets of them."""
    kind = type(optimizer).__name__.lower()
    if kind == "sgd" and not optimizer.defaults["momentum"]:
        return [set()]
    return next((names for part, names in _MOMENTS.items() if part in kind), [set()])


_MOMENTS: dict[str, list[set[str]]] = {
    "adam": [{"exp_avg", "exp_avg_sq"}],
    "lamb": [{"exp_avg", "exp_avg_sq"}],
    "lion": [{"exp_avg"}],
    "muon": [{"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}],
    "sgd": [{"momentum_buffer"}],
    "adagrad": [{"sum"}, {"exp_avg_sq"}],
    "adafactor": [{"variance"}, {"row_var", "col_var"}],
}
"""By a part of the names of an optimizer's implementations."""


@contextmanager
def optimizer_notified(engine: DeepSpeedEngine) -> Iterator[None]:
    """While inside, the state of the optimizer is loaded, which the optimizers of ZeRO 3 have to know."""
    getattr(engine.optimizer, "checkpoint_event_prologue", lambda: None)()
    yield
    getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()


def accept_any_adam(optimizer: Optimizer) -> None:
    """Let ``optimizer`` load the state of any other implementation of Adam.

    torch's would raise KeyError: 'step' for a state of apex's, and apex's would count from 0 again for one of torch's.
    """
    optimizer.register_load_state_dict_pre_hook(in_form_of)


def in_form_of(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state ``saved`` by any implementation of Adam, in the form of ``optimizer``.

    Without a step count it stays as it is.
    """
    groups = [dict(group) for group in saved["param_groups"]]
    state = {number: dict(values) for number, values in saved["state"].items()}
    for group, current in zip(groups, optimizer.param_groups, strict=True):
        numbered = zip(group["params"], current["params"], strict=True)
        states = [(state[number], parameter) for number, parameter in numbered if number in state]
        counts = [values["step"] for values, _ in states if "step" in values]
        of_group = group.pop("step", None)
        count = counts[0] if counts else of_group  # DeepSpeed's FusedAdam has one in the group, too, which is always 0
        if count is None:
            continue
        if _counts_by_group(optimizer):
            group["step"] = int(count)
        for values, parameter in states:
            own = values.pop("step", count)
            if not _counts_by_group(optimizer):
                values["step"] = _count(optimizer, parameter, own)
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
    # Fused kernels read it on the device of the weights.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.tensor(float(steps), device=parameter.device if on_device else "cpu")


def _counts_by_group(optimizer: Optimizer) -> bool:
    return _package(optimizer) == "apex"


def _package(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.split(".")[0]


class MasterWeight(NamedTuple):
    """Elements ``begin`` to ``begin + length`` of a parameter are at ``start`` in ``tensor``, both flattened."""

    tensor: Tensor
    start: int
    begin: int
    length: int


MasterWeights = Iterator[tuple[nn.Parameter, MasterWeight]]


def master_weights(engine: DeepSpeedEngine) -> dict[nn.Parameter, MasterWeight]:
    """The fp32 master weight of each parameter of which this rank's optimizer has a part."""
    for attribute, read in _WRAPPERS.items():
        if hasattr(engine.optimizer, attribute):
            return dict(read(engine.optimizer))
    parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    return dict(_flat([[parameter] for parameter in parameters], parameters))


def _zero3(optimizer: Any) -> MasterWeights:
    """Equal parts of each parameter, of which the last ones may be padding."""
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            begin = length * dist.get_rank(parameter.ds_process_group)
            length = min(length, parameter.ds_numel - begin)
            if length > 0:
                yield parameter, MasterWeight(master, start, begin, length)


def zero_master_weights(optimizer: Any) -> MasterWeights:
    """The master weights of an optimizer of ZeRO 1 or 2."""
    # Not by DeepSpeed's links between parameters and masters: with round-robin gradients they are in another order.
    groups, masters = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
    return _flat(groups, masters, optimizer.real_dp_process_group, optimizer.round_robin_bit16_offsets)


def _flat(
    groups: Sequence[Sequence[nn.Parameter]],
    masters: Sequence[Tensor],
    data_groups: Sequence[ProcessGroup] | None = None,
    offsets: Sequence[Sequence[int]] | None = None,
) -> MasterWeights:
    """A flat tensor for each group, of which each rank of ``data_groups`` has an equal part.

    Parameters begin in it at ``offsets``, without which they are consecutive.
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
    """This rank's part of a parameter that ZeRO 3 has partitioned; None of any other, or one that it gathers itself."""
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
"""DeepSpeed's optimizer wrappers by an attribute that only each of them has. In fp32 without ZeRO there is none."""
