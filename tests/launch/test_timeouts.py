"""The timeout of collectives: in every process group, and later than the watchdogs that name a hung rank."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config import ParallelConfig
from megatron.engines import silence_known_warnings
from megatron.launch import distributed as distributed_module
from megatron.launch.environment import free_port


def test_every_group_has_the_timeout(run_ranks_once) -> None:
    for minutes in run_ranks_once(2, _group_minutes, 7.0, free_port()):
        assert len(minutes) >= 8 and set(minutes.values()) == {7.0}, minutes


def _group_minutes(timeout: float, port: int) -> dict[str, float]:
    """The timeouts of all groups of a pipeline, by their names, with those that DeepSpeed's engine makes."""
    import os

    import torch.distributed as dist
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    from megatron.launch.distributed import distributed

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)  # the store of the earlier group may still listen
    with distributed(ParallelConfig(world_size=2, pipe_parallel_size=2, distributed_timeout_minutes=timeout)) as layout:
        grid = PipelineParallelGrid(topology=layout.topology)
        p2p.init_process_groups(grid)
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        backends = {group.group_name: group._get_backend(torch.device("cpu")) for group in groups}
        return {name: backend.options._timeout.total_seconds() / 60 for name, backend in backends.items()}


@pytest.mark.parametrize(
    "message",
    [
        "barrier(): using the device under current context. You can specify `device_id` in `init_process_group` to "
        "mute this warning.",
        "`torch.distributed.reduce_scatter_tensor` is deprecated. ",
        "\nfirst line\n`torch.distributed._reduce_scatter_base` is a private function; use reduce_scatter_tensor",
    ],
)
def test_warnings_that_every_run_would_print_are_silent(message: str) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_known_warnings()
        warnings.warn(message, stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]


@pytest.mark.parametrize(
    ("device", "own", "backend"), [("cpu", "ccl", "gloo"), ("cuda", "nccl", "nccl"), ("npu", "hccl", "hccl")]
)
def test_the_backend_is_that_of_the_accelerator(monkeypatch, device: str, own: str, backend: str) -> None:
    accelerator = SimpleNamespace(device_name=lambda: device, communication_backend_name=lambda: own)
    monkeypatch.setattr(distributed_module, "get_accelerator", lambda: accelerator)
    assert distributed_module._default_backend() == backend
