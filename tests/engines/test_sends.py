"""Sends of DeepSpeed's pipeline engine that do not wait for their receivers."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from torch.distributed.distributed_c10d import _get_default_store

from megatron.engines.sends import send_without_waiting

TENSORS, STAGES = 6, 2


def test_a_stage_continues_before_its_tensors_are_received(run_ranks) -> None:
    """They arrive in order, and with the engine's batch all of them have."""
    (_, under_way), (received, _) = run_ranks(2, exchange)
    assert received == [float(number) for number in range(TENSORS)]
    assert under_way == [1, 2, 2, 2, 2, 2]


def exchange() -> tuple[list[float], list[int]]:
    """Rank 1 receives nothing before rank 0 has sent as much as may be on its way, and then a tensor at a time."""
    store, rank, received, under_way = _get_default_store(), dist.get_rank(), list[float](), list[int]()

    def execute(schedule: None) -> None:
        if rank == 1:
            store.wait(["sent"])
            for _ in range(TENSORS):
                buffer = torch.empty(100_000)
                dist.recv(buffer, 0)
                received.append(buffer.mean().item())
            return
        for number in range(TENSORS):
            if number == STAGES:
                store.set("sent", "yes")
            p2p.send(torch.full((100_000,), float(number)), 1)
            under_way.append(len(p2p.send.__self__._leaving))

    grid = SimpleNamespace(stage_to_global=lambda stage_id: stage_id)
    engine = SimpleNamespace(grid=grid, num_stages=STAGES, _exec_schedule=execute)
    original = p2p.send
    send_without_waiting(engine)
    engine._exec_schedule(None)
    assert p2p.send is original
    return received, under_way
