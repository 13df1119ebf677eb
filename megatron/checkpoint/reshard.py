"""Load a universal checkpoint into an engine of any layout: each rank reads its parameters and takes its shards.

The base optimizer updates *fp32 master weights*: the parameters themselves, copies of them, or flat tensors of many
parameters, of which ZeRO gives each data-parallel rank a partition.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.checkpoint.optimizer_state import set_step
from megatron.checkpoint.parameter_state import WEIGHT, State
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.universal import OPTIMIZER_FILE, SHARED_FILE, read_state
from megatron.common.errors import CheckpointError
from megatron.parallel.expert import expert_group_of


def load_weights_and_optimizer(
    engine: DeepSpeedEngine,
    folder: Path,
    tensor_group: ProcessGroup,
    *,
    optimizer: bool,
    only: Container[str] | None = None,
) -> None:
    """Load the weights of the universal checkpoint ``folder`` into ``engine``, and with ``optimizer`` the moments.

    With ``only``, parameters of other names keep their values. Every rank calls it. Raises CheckpointError if a
    parameter is missing or has another shape.
    """

    def read(name: str, parameter: nn.Parameter) -> State:
        whole = read_state(folder, name, optimizer=optimizer)
        place = folder / "zero" / name
        return {key: _local_shard(value, parameter, tensor_group, place) for key, value in whole.items()}

    load_states(engine, read, only)
    if optimizer:
        _restore_loss_scale(engine, read_file(folder / OPTIMIZER_FILE))


def load_states(
    engine: DeepSpeedEngine, read: Callable[[str, nn.Parameter], State], only: Container[str] | None = None
) -> None:
    """Load the state that ``read`` returns of each parameter, this tensor-parallel rank's shard, into ``engine``.

    With ``only``, parameters of other names keep their values. Every rank calls it.
    """
    # DeepSpeed's own loading notifies the optimizers that have these methods, too.
    getattr(engine.optimizer, "checkpoint_event_prologue", lambda: None)()
    masters = master_weights(engine)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if only is not None and name not in only:
                continue
            state = read(name, parameter)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(state[WEIGHT])
            if parameter in masters:
                _copy_state(masters[parameter], state, engine.basic_optimizer)
    getattr(engine.optimizer, "checkpoint_event_epilogue", lambda: None)()


def load_progress(engine: DeepSpeedEngine, folder: Path) -> None:
    """Load the schedule and the counters of the universal checkpoint ``folder`` into ``engine``."""
    shared = read_file(folder / SHARED_FILE)
    engine.lr_scheduler.load_state_dict(shared["lr_scheduler"])
    engine.global_steps = shared["global_steps"]
    engine.global_samples = shared["global_samples"]
    engine.skipped_steps = shared["skipped_steps"]


def _local_shard(value: Any, parameter: nn.Parameter, group: ProcessGroup, path: Path) -> Any:
    """This rank's experts and tensor-parallel shard of a whole weight or moment; a step count as it is."""
    if not (isinstance(value, Tensor) and value.dim()):
        return value
    shape = getattr(parameter, "ds_shape", parameter.shape)
    if (experts := expert_group_of(parameter)) is not None:
        value = value.chunk(experts.size())[experts.rank()]
    dim = getattr(parameter, "partition_dim", None)
    if dim is not None:
        missing = shape[dim] * group.size() - value.size(dim)
        if missing > 0 and dim == 0:
            value = F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing))  # the vocabulary's padding, without moments
        value = value.chunk(group.size(), dim)[group.rank()]
    if value.shape != shape:
        raise CheckpointError(f"{path} is {list(value.shape)} on this rank, and the model's {list(shape)}")
    return value


def _copy_state(master: "MasterWeight", state: State, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's part of a parameter's state into the optimizer."""
    tensor, start, begin, length = master
    moments = optimizer.state[tensor]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            target = tensor if key == WEIGHT else moments.setdefault(key, torch.zeros_like(tensor))
            target.data.view(-1)[start : start + length].copy_(value.flatten()[begin : begin + length])
        else:
            set_step(optimizer, tensor, float(value))


def _restore_loss_scale(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Restore the loss scale if both runs have a dynamic one; otherwise it starts as the flags specify."""
    source = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
    if saved.get("dynamic_loss_scale") and getattr(engine.optimizer, "dynamic_loss_scale", False):
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if name in source:
                setattr(engine.optimizer.loss_scaler, name, source[name])


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


def _zero1_and_2(optimizer: Any) -> MasterWeights:
    # Not by DeepSpeed's links between parameters and masters: with round-robin gradients they are in another order.
    groups, masters = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
    return _flat(groups, masters, optimizer.real_dp_process_group, optimizer.round_robin_bit16_offsets)


def _bf16(optimizer: Any) -> MasterWeights:
    return _flat(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, optimizer.real_dp_process_group)


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


_WRAPPERS: dict[str, Callable[[Any], MasterWeights]] = {
    "fp32_partitioned_groups_flat": _zero3,
    "single_partition_of_fp32_groups": _zero1_and_2,
    "fp32_groups_flat_partition": _bf16,
}
"""DeepSpeed's optimizer wrappers by an attribute that only each of them has. In fp32 without ZeRO there is none."""
