"""Resharding: loads weights and optimizer state on any layout; each rank reads only its parts."""

from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.checkpoint.across_ranks import check_share_of_states
from megatron.checkpoint.checks import check_numbers, form_errors, value_at
from megatron.checkpoint.collective_errors import on_all_ranks
from megatron.checkpoint.parameter_state import SavedStates
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.saved_layout import model_file, optimizer_file
from megatron.checkpoint.schema import Updates, check_counts, check_loss_scale, check_state
from megatron.checkpoint.stored import WEIGHT, Shard, State, is_flat
from megatron.checkpoint.tensor_files import read_file
from megatron.common.errors import CheckpointError
from megatron.engines.state import (
    MasterWeight,
    master_weights,
    moment_names,
    optimizer_notified,
    own_weights,
    restore_loss_scale,
    restore_progress,
    set_step,
)
from megatron.parallel.expert import expert_group_of

_WEIGHTS_ONLY = Updates()
UpdatesOf = Callable[[nn.Parameter], Updates]


def load_resharded(
    engine: DeepSpeedEngine,
    saved: SavedRun,
    tensor_group: ProcessGroup,
    *,
    optimizer: bool,
    progress: bool,
    only: Container[str] | None = None,
) -> None:
    """Load the weights of ``saved`` into ``engine``; ``optimizer`` also loads the moments, ``progress`` the counters.

    The files must have been verified. With ``only``, parameters with other names keep their values. Every rank must
    call it. Raises the same errors as ``load_states``.
    """
    path = saved.path
    with form_errors(path):
        states = SavedStates(saved, verified=True)
    shared, applied, scaling = on_all_ranks(lambda: _read_shared(engine, saved, optimizer=optimizer, progress=progress))

    def updates(parameter: nn.Parameter) -> Updates:
        return Updates(moment_names(engine.basic_optimizer, parameter) if optimizer and applied else (), applied)

    def read(name: str, parameter: nn.Parameter) -> State:
        shape, experts = getattr(parameter, "ds_shape", parameter.shape), expert_group_of(parameter)
        first_expert = 0 if experts is None else experts.rank() * shape[0]
        state = states.shard(name, shape, tensor_group.rank(), tensor_group.size(), first_expert)
        return state if optimizer else {WEIGHT: state[WEIGHT]}

    check_share_of_states(states)
    load_states(engine, read, path, only, updates)
    with form_errors(path):
        if optimizer:
            restore_loss_scale(engine, scaling)
        if progress:
            restore_progress(engine, shared)


def _read_shared(
    engine: DeepSpeedEngine, saved: SavedRun, *, optimizer: bool, progress: bool
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """(state that all ranks share, number of applied iterations, state of the optimizer with the loss scale), checked.

    The optimizer's is empty without ``optimizer``.
    """
    path, layout, scaling = saved.path, saved.layout, {}
    with form_errors(file := model_file(path, layout, 0)):
        shared = read_file(file)
        applied = check_counts(file, shared, saved, progress=progress)
        if progress:
            engine.lr_scheduler.chosen(value_at(file, shared, "lr_scheduler"))
    if optimizer and layout.has_optimizer_partitions:
        file = optimizer_file(path, layout, 0, 0)
        scaling = value_at(file, read_file(file), "optimizer_state_dict")
    elif optimizer:
        scaling = value_at(file, shared, "optimizer")
    check_loss_scale(file, scaling)
    return shared, applied, scaling


def load_states(
    engine: DeepSpeedEngine,
    read: Callable[[str, nn.Parameter], State],
    source: Path,
    only: Container[str] | None = None,
    updates: UpdatesOf = lambda _: _WEIGHTS_ONLY,
) -> None:
    """Load the state of each parameter, this tensor-parallel rank's shard, which ``read`` returns, into ``engine``.

    With ``only``, parameters with other names keep their values. Every rank must call it. Raises CheckpointError with
    the path ``source`` if a state is missing, or does not match its parameter or, if that is trained, ``updates``.
    """
    parameters = [item for item in engine.module.named_parameters() if only is None or item[0] in only]

    def outlines() -> dict[str, State]:
        states = {}
        for name, parameter in parameters:
            with form_errors(source):
                state = read(name, parameter)
                if not parameter.requires_grad:  # a frozen parameter may have been trained earlier
                    state = {WEIGHT: state[WEIGHT]}
                needed = updates(parameter) if parameter.requires_grad else _WEIGHTS_ONLY
                check_state(source, name, state, getattr(parameter, "ds_shape", parameter.shape), needed)
            states[name] = state
        return states

    checked = on_all_ranks(outlines)  # before anything is copied
    masters, errors = master_weights(engine), list[CheckpointError]()

    def part(name: str, value: Any, begin: int, length: int, used_as: torch.dtype = torch.float32) -> Tensor:
        """Elements of a part of a state in fp32; after an error zeros, since the other ranks wait in collectives."""
        end = begin + length
        try:
            with form_errors(source):
                if not errors and isinstance(value, Shard):
                    return value.read(begin, end, used_as).float()
                if not errors:
                    check_numbers(source, name, elements := value.flatten()[begin:end], used_as)
                    return elements.float()
        except CheckpointError as error:
            errors.append(error)
        return torch.zeros(length)

    def raise_error() -> None:
        if errors:
            raise errors[0]

    with optimizer_notified(engine), torch.no_grad():
        for name, parameter in parameters:
            _copy_state(engine, partial(part, name), parameter, checked.pop(name), masters.get(parameter))
    on_all_ranks(raise_error)


def _copy_state(
    engine: DeepSpeedEngine,
    part: Callable[..., Tensor],
    parameter: nn.Parameter,
    state: State,
    master: MasterWeight | None,
) -> None:
    """Copy this rank's parts of a parameter's state, which ``part`` reads, into the model and the optimizer."""
    if (own := own_weights(parameter)) is not None:
        weights, first = part(state[WEIGHT], own.begin, own.length, own.tensor.dtype), own.begin
        own.tensor.view(-1)[: own.length].copy_(weights)
    else:
        length = getattr(parameter, "ds_numel", parameter.numel())
        weights, first = part(state[WEIGHT], 0, length, parameter.dtype), 0
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(weights.view(parameter.shape))
    if master is None:
        return
    tensor, start, begin, length = master
    moments = engine.basic_optimizer.state[tensor]
    for key, value in state.items():
        if is_flat(value):
            is_weight = key == WEIGHT
            target = tensor if is_weight else moments.setdefault(key, torch.zeros_like(tensor))
            elements = weights[begin - first :][:length] if is_weight else part(value, begin, length)
            target.data.view(-1)[start : start + length].copy_(elements)
        else:
            set_step(engine.basic_optimizer, tensor, float(value))
