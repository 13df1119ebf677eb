"""What a run says of itself before it begins."""

import dataclasses
import json

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from megatron.config import RunConfig
from megatron.config.summary import describe_config
from megatron.parallel.layout import ParallelLayout


def describe_run(run: RunConfig) -> str:
    """Layout, model, batch, schedule, device and the finished DeepSpeed config, a line each."""
    rows = {
        **describe_config(run),
        "device": f"{device_name()}, torch {torch.__version__}",
        "deepspeed": json.dumps(run.ds_config),
    }
    return "\n".join(f"> {name:9} {text}" for name, text in rows.items())


def device_name() -> str:
    """What this rank computes on, such as ``cpu`` or ``cuda (NVIDIA H100)``."""
    device = get_accelerator().device_name()
    return device if device == "cpu" else f"{device} ({torch.get_device_module(device).get_device_name()})"


def describe_model(module: nn.Module, layout: ParallelLayout) -> str:
    """Parameters in all, each counted once, and on each rank of the first data-parallel replica."""
    held = sum(_numel(p) for p in module.parameters())
    unique = sum(
        _numel(p)
        for p in module.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
        and (getattr(p, "model_parallel", False) or layout.tensor_group.rank() == 0)
        and (layout.sequence_group is None or layout.sequence_group.rank() == 0)
    )
    counts = torch.tensor([held, unique], device=get_accelerator().current_device_name())
    everyone = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, counts)
    replica = [rank for rank in range(len(everyone)) if layout.topology.get_coord(rank).data == 0]
    total = sum(int(everyone[rank][1]) for rank in replica)
    ranks = ", ".join(f"rank {rank} {int(everyone[rank][0]):,}" for rank in replica[:8])
    more = f", and {len(replica) - 8} more" if len(replica) > 8 else ""
    return f"> parameters {total:,} in all, padding included; {ranks}{more}"


def full_config(run: RunConfig) -> str:
    """Everything the run was made from, as JSON."""
    return json.dumps(dataclasses.asdict(run), indent=2)


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves an empty shell of each parameter
