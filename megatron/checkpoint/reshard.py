"""Load a universal checkpoint into an engine of any layout: each rank reads its parameters and takes its shards."""

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.checkpoint.parameter_state import WEIGHT, State
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.universal import OPTIMIZER_FILE, read_state
from megatron.common.errors import CheckpointError
from megatron.engines.state import MasterWeight, master_weights, restore_loss_scale, set_step
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
        restore_loss_scale(engine, read_file(folder / OPTIMIZER_FILE))


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


def _copy_state(master: MasterWeight, state: State, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's part of a parameter's state into the optimizer."""
    tensor, start, begin, length = master
    moments = optimizer.state[tensor]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            target = tensor if key == WEIGHT else moments.setdefault(key, torch.zeros_like(tensor))
            target.data.view(-1)[start : start + length].copy_(value.flatten()[begin : begin + length])
        else:
            set_step(optimizer, tensor, float(value))
