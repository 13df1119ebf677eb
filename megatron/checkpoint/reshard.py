"""Take up a universal checkpoint in an engine of any layout: each rank reads the parameters it holds, and cuts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.checkpoint.master_weights import Fragment, fragments
from megatron.checkpoint.optimizer_state import WEIGHT, State
from megatron.checkpoint.universal import read_optimizer, read_shared, read_state
from megatron.config.errors import CheckpointError


def load_weights_and_optimizer(
    engine: DeepSpeedEngine, folder: Path, tensor_group: ProcessGroup, *, optimizer: bool
) -> None:
    """Give ``engine`` the weights of the universal checkpoint ``folder``, and its moments where ``optimizer`` says so.

    Every rank calls it. Raises CheckpointError where a parameter is missing or has another shape.
    """
    _event(engine, "checkpoint_event_prologue")
    places = fragments(engine)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            whole = read_state(folder, name, optimizer=optimizer)
            state = {
                key: _local_shard(value, parameter, tensor_group, folder / "zero" / name)
                for key, value in whole.items()
            }
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(state[WEIGHT])
            if parameter in places:
                _fill(places[parameter], state, engine.basic_optimizer)
    if optimizer:
        _restore_loss_scale(engine, read_optimizer(folder))
    _event(engine, "checkpoint_event_epilogue")


def load_progress(engine: DeepSpeedEngine, folder: Path) -> None:
    """Give ``engine`` the schedule and the counts of the universal checkpoint ``folder``."""
    shared = read_shared(folder)
    engine.lr_scheduler.load_state_dict(shared["lr_scheduler"])
    engine.global_steps = shared["global_steps"]
    engine.global_samples = shared["global_samples"]
    engine.skipped_steps = shared["skipped_steps"]


def _local_shard(value: Any, parameter: nn.Parameter, group: ProcessGroup, place: Path) -> Any:
    """What this tensor-parallel rank has of a whole weight or moment; a step count as it is."""
    if not (isinstance(value, Tensor) and value.dim()):
        return value
    shape = getattr(parameter, "ds_shape", parameter.shape)
    dim = getattr(parameter, "partition_dim", None)
    if dim is not None:
        missing = shape[dim] * group.size() - value.size(dim)
        if missing > 0 and dim == 0:
            value = F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing))  # the vocabulary's padding, without moments
        value = value.chunk(group.size(), dim)[group.rank()]
    if value.shape != shape:
        raise CheckpointError(f"{place} is {list(value.shape)} on this rank, and the model's {list(shape)}")
    return value


def _fill(place: Fragment, state: State, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's fragment of a parameter's state into the optimizer."""
    master, start, begin, length = place
    kept = optimizer.state[master]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim():
            target = master if key == WEIGHT else kept.setdefault(key, torch.zeros_like(master))
            target.data.view(-1)[start : start + length].copy_(value.flatten()[begin : begin + length])
        else:
            _set_step(optimizer, master, int(value))


def _set_step(optimizer: torch.optim.Optimizer, master: Tensor, step: int) -> None:
    """Updates so far, in the form that the optimizer counts them in."""
    kind = type(optimizer).__module__.split(".")[0]
    if kind == "apex":
        for group in optimizer.param_groups:
            group["step"] = step
    else:
        optimizer.state[master]["step"] = torch.tensor(float(step)) if kind == "torch" else step


def _restore_loss_scale(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Go on with the loss scale where both runs have a dynamic one; another starts as the flags say."""
    source = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
    target = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    if saved.get("dynamic_loss_scale") and getattr(engine.optimizer, "dynamic_loss_scale", False):
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
            if name in source and hasattr(target, name):
                setattr(target, name, source[name])


def _event(engine: DeepSpeedEngine, name: str) -> None:
    """Tell the optimizer, where it wants to know, as DeepSpeed's own loading does."""
    action: Callable[[], None] | None = getattr(engine.optimizer, name, None)
    if action is not None:
        action()
