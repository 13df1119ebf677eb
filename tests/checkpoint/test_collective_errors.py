"""Steps of all ranks: results reach rank 0 in order by a tree, and errors reach every rank."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.command_lines import SMALL

from megatron.checkpoint import collective_errors
from megatron.checkpoint.collective_errors import gathered, gathered_on_rank_0, on_all_ranks
from megatron.cli import parse_run
from megatron.common.errors import CheckpointError, UserError
from megatron.launch.distributed import distributed
from megatron.tools.communication.check import Call, Issue, Trace, check, programs


def failing_on(*ranks: int) -> Callable[[], int]:
    def step() -> int:
        if dist.get_rank() in ranks:
            raise CheckpointError(f"rank {dist.get_rank()} cannot")
        return dist.get_rank()

    return step


@pytest.mark.ranks(3)
def test_results_and_errors() -> None:
    run = parse_run(SMALL.split(), os.environ)
    with distributed(run.parallel):
        assert gathered_on_rank_0(failing_on(), tuple) == (0, 1, 2)
        assert on_all_ranks(failing_on()) == dist.get_rank()
        for step in (lambda: on_all_ranks(failing_on(2, 1)), lambda: gathered_on_rank_0(failing_on(2, 1), tuple)):
            with pytest.raises(UserError, match="rank 1 cannot") as caught:
                step()
            assert isinstance(caught.value, CheckpointError) and caught.value.on_every_rank


def simulated(monkeypatch: pytest.MonkeyPatch, size: int) -> tuple[list[int], int, list[Trace]]:
    """What rank 0 gathers of the numbers of ``size`` ranks, after how many messages, and what each of them calls.

    A rank receives from ranks of higher numbers only, which therefore come first.
    """
    sent: dict[int, tuple[list[int], int]] = {}
    found: list[int] = []
    traces: list[Trace] = []
    for rank in reversed(range(size)):
        clock, events = [0], []

        def call(kind: str, peer: int, rank: int = rank, events: list = events) -> None:
            detail = (kind, 0, 1, "uint8", 1, (peer - rank) % size, "", "saving", f"tree.py:1 {kind}")
            events.append(Issue((Call(*detail),), True))

        def receive(objects: list, peer: int, *, use_batch: bool, call=call, clock: list = clock) -> None:
            objects[0], other = sent.pop(peer)
            clock[0] = max(clock[0], other) + 1
            call("recv", peer)

        def send(objects: list, peer: int, *, use_batch: bool, own: int = rank, call=call, clock: list = clock) -> None:
            sent[own] = objects[0], clock[0]
            call("send", peer)

        ranks = {"get_rank": lambda rank=rank: rank, "get_world_size": lambda: size}
        monkeypatch.setattr(
            collective_errors, "dist", SimpleNamespace(**ranks, recv_object_list=receive, send_object_list=send)
        )
        found = gathered([rank])
        traces.append(Trace(rank, threads={"main": events}))
    assert not sent
    return found, clock[0], traces[::-1]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 13, 16384])
def test_the_tree_has_logarithmic_depth_and_no_rank_can_hang(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    found, messages, traces = simulated(monkeypatch, size)
    assert found == list(range(size))
    assert messages <= (size - 1).bit_length()
    assert all(len(trace.threads["main"]) <= 1 + (size - 1).bit_length() for trace in traces)
    if size < 100:
        check(programs(traces))  # even if each send waits for its receiver
