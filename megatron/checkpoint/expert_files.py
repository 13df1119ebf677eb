"""Files with the experts of all ranks of an expert group but the first, whose experts are in DeepSpeed's files:

    TAG/expert_rank_EE_mp_rank_RR_states.pt    {name: state} of the experts of rank EE of the group, from 1 on

RR is the model-parallel rank, stage x tensor-parallel size + tensor rank. See ``parameter_state`` for a state.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.common.checkpoint_folders import existing_rank_file
from megatron.config import RunConfig
from megatron.engines.state import parameter_states
from megatron.parallel import coordinates
from megatron.parallel.expert import expert_group_of

State = dict[str, Any]
"""The state of a parameter by name: its weight, and the optimizer's moments and step count."""
WEIGHT = "fp32"
"""Name of the weight."""


def expert_file(folder: Path, expert_rank: int, mp_rank: int) -> Path:
    """The file of one rank of an expert group."""
    return existing_rank_file(folder / f"expert_rank_{expert_rank:02d}_mp_rank_{mp_rank:02d}_states.pt")


def own_experts(engine: DeepSpeedEngine, run: RunConfig, folder: Path) -> tuple[Path, dict[str, State]] | None:
    """The expert file that this rank must write into ``folder``, and its content; None if it writes none.

    One of the ranks that hold the same experts writes it. With ZeRO the optimizer state is in DeepSpeed's files.
    """
    parallel, coordinate = run.parallel, coordinates(run.parallel, dist.get_rank())
    replica, expert_rank = divmod(coordinate["data"], parallel.expert_model_parallel_size)
    if replica > 0 or expert_rank == 0:
        return None
    has_state = run.zero.zero_stage == 0 and not run.checkpoint.no_save_optim
    states = parameter_states(engine) if has_state else {}
    content = {
        name: {**states.get(name, {}), WEIGHT: parameter.detach()}
        for name, parameter in engine.module.named_parameters()
        if expert_group_of(parameter) is not None
    }
    mp_rank = coordinate["pipe"] * parallel.model_parallel_size + coordinate["tensor"]
    return expert_file(folder, expert_rank, mp_rank), content
