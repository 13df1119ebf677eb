"""Collectives through shared memory: equal to gloo's, the same on every rank, and none waits for a rank that ended."""

import os
import platform
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import fork_server

from megatron.parallel import shared_memory as memory
from megatron.parallel.shared_memory import NAME, SWITCH, SharedMemoryGroup, backend_of_groups

SIZES = (1, 3, 1000, 600_001)
"""Elements; the last are more than a message of any type."""


@pytest.mark.parametrize(("ranks", "spin_seconds"), [(2, 1e-3), (2, 0.0), (4, 0.0)])
def test_collectives_are_those_of_gloo(run_ranks, ranks: int, spin_seconds: float) -> None:
    """For ranks that keep looking before they sleep, and for such that sleep at once."""
    assert len(set(run_ranks(ranks, _collectives_agree, spin_seconds))) == 1, "each rank has the same bits"


def _collectives_agree(spin_seconds: float) -> float:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(memory, "SPIN_SECONDS", spin_seconds)
        group = dist.new_group(backend=backend_of_groups("cpu"))
    assert isinstance(group, SharedMemoryGroup) and group.memory is not None
    mapped = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]
    assert set(mapped) == {f"/memfd:{NAME} (deleted)"}, "no file that a killed rank could leave behind"
    rank, size = group.rank(), group.size()
    torch.manual_seed(rank)
    with torch.inference_mode():  # a model that generates, and is trained afterwards
        dist.all_reduce(torch.ones(3), group=group)
    for elements in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            whole = torch.randint(-8, 8, (size * elements,)).to(dtype)  # sums are exact
            expected = _results(whole, dist.group.WORLD, is_async=False)
            for is_async in (False, True):
                torch.testing.assert_close(_results(whole, group, is_async), expected, rtol=0, atol=0)
            torch.testing.assert_close(_within_whole(whole, group), expected[1:], rtol=0, atol=0)
    square = torch.arange(12.0).view(3, 4).t()[::2]
    expected = square * size
    dist.all_reduce(square, group=group)
    assert square.equal(expected), "not contiguous, in place"
    _agree_with_uneven_parts(group)
    works = [dist.all_reduce(x, group=group, async_op=True) for x in (square, expected)]
    dist.barrier(group)
    while not works[-1].is_completed():
        time.sleep(0.001)
    for work in reversed(works):
        work.wait()
    assert square.equal(expected)
    largest = torch.tensor([rank])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert largest.item() == size - 1, "gloo does what shared memory does not"
    total_of_random = torch.rand(SIZES[-1])
    total_of_gloo = total_of_random.clone()
    dist.all_reduce(total_of_random, group=group)
    dist.all_reduce(total_of_gloo)
    assert size > 2 or total_of_random.equal(total_of_gloo)
    return float(total_of_random.view(torch.int32).long().sum())


def _results(whole: torch.Tensor, group: dist.ProcessGroup, is_async: bool) -> list[torch.Tensor]:
    options = {"group": group, "async_op": is_async}
    summed, part = whole.clone(), torch.empty(len(whole) // group.size(), dtype=whole.dtype)
    gathered = torch.empty_like(whole)
    for function, tensors in (
        (dist.all_reduce, [summed]),
        (dist.reduce_scatter_tensor, [part, whole.clone()]),
        (dist.all_gather_into_tensor, [gathered, part]),
    ):
        if (work := function(*tensors, **options)) is not None:
            work.wait()
    return [summed, part, gathered]


def _within_whole(whole: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Without a tensor for this rank's part, as DeepSpeed has it."""
    summed = whole.clone()
    part = summed.chunk(group.size())[group.rank()]
    dist.reduce_scatter_tensor(part, summed, group=group)
    gathered = torch.zeros_like(whole)
    inside = gathered.chunk(group.size())[group.rank()].copy_(part)
    dist.all_gather_into_tensor(gathered, inside, group=group)
    return [part, gathered]


def _agree_with_uneven_parts(group: dist.ProcessGroup) -> None:
    """Rank r receives 200,000 r elements."""
    parts = [torch.full((200_000 * of_rank,), group.rank() + 1.0) for of_rank in range(group.size())]
    total = torch.empty_like(parts[group.rank()])
    dist.reduce_scatter(total, parts, group=group)
    assert total.eq(sum(range(group.size() + 1))).all()


def test_no_rank_waits_for_one_that_has_ended(tmp_path: Path) -> None:
    """The error is gloo's, and the processor idle until then."""
    other = fork_server().Process(target=_stop_in_group, args=(str(tmp_path / "store"),))
    other.start()
    group = _joined(tmp_path / "store", 0)
    assert other.pid is not None
    threading.Timer(1.0, os.kill, (other.pid, signal.SIGKILL)).start()
    begin = time.process_time()
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 of the group has ended"):
        group.allreduce([torch.ones(3)]).wait()
    assert time.process_time() - begin < 0.3
    other.join()


def _stop_in_group(store: str) -> None:
    _joined(Path(store), 1)
    signal.pause()


def _joined(store: Path, rank: int) -> SharedMemoryGroup:
    group = SharedMemoryGroup(dist.FileStore(str(store), 2), rank, 2, timedelta(seconds=60))
    assert group.memory is not None
    return group


@pytest.mark.ranks(2)
def test_collectives_of_different_sizes_are_reported() -> None:
    group = dist.new_group(backend=backend_of_groups("cpu"))
    ranks = f"ranks {group.rank()} and {1 - group.rank()}"
    with pytest.raises(RuntimeError, match=f"{ranks} of a group call collectives of different sizes"):
        dist.all_reduce(torch.ones(1 + group.rank()), group=group)


@pytest.mark.parametrize("reason", ["switch", "container", "processor"])
@pytest.mark.ranks(2)
def test_one_rank_without_shared_memory_leaves_the_group_to_gloo(reason: str) -> None:
    rank, namespace = dist.get_rank(), memory.pid_namespace
    with pytest.MonkeyPatch.context() as patches:
        if reason == "container":  # from which the other's processes are not seen
            patches.setattr(memory, "pid_namespace", lambda: f"{namespace()}{rank}")
        elif reason == "switch" and rank == 1:
            patches.setenv(SWITCH, "0")
        elif rank == 0:
            patches.setattr(platform, "machine", lambda: "aarch64")
        group = dist.new_group(backend=backend_of_groups("cpu"))
    assert isinstance(group, SharedMemoryGroup) and group.memory is None
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total, group=group)
    assert total.item() == 3


def test_no_collective_is_called_with_pythons_lock() -> None:
    """torch holds it while it calls what a group in Python leaves to C++; gloo's threads may need it meanwhile."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    left = set(re.findall(r"c10::intrusive_ptr<Work> (\w+)\(", header.read_text()))
    assert len(left) > 8 and left <= vars(SharedMemoryGroup).keys()


def test_other_devices_and_backends_keep_theirs(monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert backend_of_groups("cuda") is None
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert backend_of_groups("cpu") is None
