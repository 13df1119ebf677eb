"""Files of experts: what the ranks of an expert group hold that DeepSpeed does not save.

    TAG/expert_rank_EE_mp_rank_RR_states.pt    {name: state} of the experts of rank EE of the group, from 1 on

RR is the model-parallel rank, stage x tensor-parallel size + tensor rank. DeepSpeed saves weights, and at ZeRO 0 the
optimizer's state, of the first data-parallel rank alone, which is rank 0 of its expert group.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.saved_run import SavedRun
from megatron.checkpoint.tensor_files import read_file
from megatron.config import RunConfig
from megatron.engines.state import parameter_states
from megatron.model.architectures import architecture_of
from megatron.parallel import coordinates
from megatron.parallel.expert import expert_group_of

State = dict[str, Any]
"""The state of a parameter by name: its weight, and the optimizer's moments and step count."""
WEIGHT = "fp32"
"""Name of the weight."""


def expert_file(folder: Path, expert_rank: int, mp_rank: int) -> Path:
    """The file of one rank of an expert group."""
    return folder / f"expert_rank_{expert_rank:02d}_mp_rank_{mp_rank:02d}_states.pt"


def own_experts(engine: DeepSpeedEngine, run: RunConfig, folder: Path) -> tuple[Path, dict[str, State]] | None:
    """The file that this rank has to write into ``folder``, and its content; None if there is none.

    Of the ranks that hold the same experts one writes. With ZeRO the optimizer's state is in DeepSpeed's files.
    """
    parallel, place = run.parallel, coordinates(run.parallel, dist.get_rank())
    replica, expert_rank = divmod(place["data"], parallel.expert_model_parallel_size)
    if replica > 0 or expert_rank == 0:
        return None
    has_state = run.zero.zero_stage == 0 and not run.checkpoint.no_save_optim
    states = parameter_states(engine) if has_state else {}
    content = {
        name: {**states.get(name, {}), WEIGHT: parameter.detach().clone()}
        for name, parameter in engine.module.named_parameters()
        if expert_group_of(parameter) is not None
    }
    mp_rank = place["pipe"] * parallel.model_parallel_size + place["tensor"]
    return expert_file(folder, expert_rank, mp_rank), content


def read_others(saved: SavedRun, mp_rank: int) -> list[Mapping[str, State]]:
    """States of the experts of a model-parallel rank, of all ranks of its expert group but the first, in order."""
    ranks = range(1, saved.layout.expert_parallel_size)
    return [read_file(expert_file(saved.path, rank, mp_rank), mapped=True) for rank in ranks]


def expert_names(saved: SavedRun) -> set[str]:
    """Names of the parameters whose first dimension is that of experts."""
    config = saved.whole_model_config()
    return {name for name, spec in architecture_of(config).named_parameters(config).items() if spec.is_expert}
