"""Plans a layout for the surviving hosts: the same training run with the same global batch on fewer devices."""

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from megatron.cli.flags import read_flags
from megatron.cli.provided import Provided
from megatron.cli.resolve import resolve_run
from megatron.common.environment import ranks_on_host
from megatron.common.errors import ConfigError, counted
from megatron.config import RunConfig
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.tools.planning.machine import DEVICES, Device, Machine, device_of_name
from megatron.tools.planning.request import arguments_of, as_flag, make_request
from megatron.tools.planning.search import Candidate, search

_CHOSEN = (
    "model_parallel_size",
    "pipe_parallel_size",
    "sequence_parallel",
    "pipeline_partition",
    "micro_batch_size",
    "gradient_accumulation_steps",
)
"""Layout flags that are always chosen again."""
_CHOSEN_IF_NEEDED = (
    "zero_stage",
    "ds_sequence_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "cp_comm_type",
    "pipeline_schedule",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "checkpoint_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)
"""Layout flags that are kept as long as a layout with them fits."""
_ALL = (*_CHOSEN, *_CHOSEN_IF_NEEDED)
_BATCH = {"global_batch_size", "step_batch_size_schedule"}
_MOST_SIZES = 3
"""How many numbers of hosts with fitting layouts are compared for the fastest."""


class PlannedLayout(NamedTuple):
    """A planned layout for the first hosts of a list."""

    hosts: int
    """Number of hosts that are used."""
    candidate: Candidate
    arguments: list[str]
    """Arguments of the training program: the given ones with this layout."""
    fitting: int
    """Number of layouts that fit on these hosts."""

    def __str__(self) -> str:
        parallel, train = self.candidate.run.parallel, self.candidate.run.train
        sizes = {"TP": parallel.model_parallel_size, "PP": parallel.pipe_stages, "DP": parallel.data_parallel_size}
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
        gigabytes = (self.candidate.memory.total / 1e9, self.candidate.request.room / 1e9)
        return (
            f"{layout}, micro-batch {train.micro_batch_size}, ZeRO {self.candidate.run.zero.zero_stage}: the fastest "
            f"of {self.fitting} that fit, {self.candidate.timing.total:.3g} s per iteration and "
            f"{gigabytes[0]:.2g} of {gigabytes[1]:.3g} GB by estimate"
        )


def plan_survivors(
    arguments: Sequence[str],
    run: RunConfig,
    slots: Sequence[int],
    device: Device,
    *,
    least: int = 1,
    architecture: ArchitectureSpec = GPT2,
) -> PlannedLayout | None:
    """The fastest layout on at least the first ``least`` of the hosts with these ``slots``; None if none fits.

    Global batch sizes, model, data and learning-rate schedule stay as in ``run``, the config of ``arguments``.

    Raises ConfigError if the planner does not support an argument, such as ``--deepspeed_config``.
    """
    given, _, _ = read_flags(arguments, architecture)
    for chosen in (_CHOSEN, _ALL):
        fixed = {name: value for name, value in given.items() if name not in chosen}
        if not _BATCH & given.keys():
            fixed["global_batch_size"] = as_flag("global_batch_size", run.train.global_batch_size)
        numbers = range(len(slots), least - 1, -1)
        searched = ((hosts, _fitting(fixed, run, slots[:hosts], device, architecture)) for hosts in numbers)
        plans = list(islice((plan for plan in searched if plan[1]), _MOST_SIZES))
        if plans:
            hosts, fitting = min(plans, key=lambda plan: plan[1][0].timing.total)
            flags = {name: fitting[0].given[name] for name in _ALL if name in fitting[0].given}
            return PlannedLayout(hosts, fitting[0], arguments_of({**fixed, **flags}), len(fitting))
    return None


def arguments_at_world_size(
    arguments: Sequence[str], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2
) -> tuple[list[str], str]:
    """``--elastic-layout``: the arguments for the number of ranks in ``environ``, and a description of the choice.

    The sizes of tensor, pipeline, context and expert parallelism stay as given if the layout is supported on these
    ranks and fits in memory. Every rank gets the same answer. Raises ConfigError if no layout of these ranks fits.
    """
    given, _, _ = read_flags(arguments, architecture)
    if not _BATCH & given.keys():
        raise ConfigError("--elastic-layout needs --global-batch-size, which stays the same on other numbers of ranks")
    run, _ = resolve_run(given, environ, architecture)
    ranks, on_host = run.parallel.world_size, ranks_on_host(environ) or run.parallel.world_size
    slots = [on_host] * (ranks // on_host) if ranks % on_host == 0 else [ranks]
    device = device_here(run.parallel.device) or DEVICES["a100"]._replace(memory=math.inf)
    is_given = {"model_parallel_size", "pipe_parallel_size"} & given.keys()
    fitting = _fitting(given, run, slots, device, architecture) if is_given else []
    if any(_sizes(candidate.run) == _sizes(run) for candidate in fitting):
        return list(arguments), f"the layout as given, on {counted(ranks, 'rank')}"
    planned = plan_survivors(arguments, run, slots, device, least=len(slots), architecture=architecture)
    if planned is None:
        raise ConfigError(
            f"--elastic-layout: no layout of {counted(ranks, 'rank')} is supported and fits: start another number of "
            "them; tools/plan.py lists why"
        )
    return planned.arguments, f"on {counted(ranks, 'rank')}: {planned}"


def name_of_gpu() -> str:
    """The name of this host's first GPU; empty if there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def device_here(kind: str, query: Callable[[], str] = name_of_gpu) -> Device | None:
    """This host's device of a ``kind``, such as cuda; None if the planner does not know it."""
    return DEVICES["cpu"] if kind == "cpu" else device_of_name(query())


def _fitting(
    fixed: Mapping[str, Provided],
    run: RunConfig,
    slots: Sequence[int],
    device: Device,
    architecture: ArchitectureSpec,
) -> list[Candidate]:
    """The layouts with the ``fixed`` flags that fit on hosts with these ``slots``, the fastest first."""
    request = make_request(
        arguments_of(fixed),
        Machine(device, min(slots)),
        sum(slots),
        precision=run.precision.dtype,
        vocab_size=run.model.vocab_size or None,
        architecture=architecture,
    )
    plan = search(request)
    return [*plan.fitting, *plan.superseded]


def _sizes(run: RunConfig) -> tuple[int, int]:
    """Context- and expert-parallel sizes, which the planner searches unless they are given."""
    return run.parallel.context_parallel_size, run.parallel.expert_model_parallel_size
