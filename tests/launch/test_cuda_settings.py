"""What CUDA and its allocator read when they start: set before torch is imported, unless the user has set it."""

import os
from pathlib import Path

import pytest

from megatron.config import ParallelConfig
from megatron.launch.environment import cores_near_gpu, describe_cuda, prepare_cuda

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Two NUMA nodes, one with two GPUs and one with one."""
    for address, node in [("0000:19:00.0", 0), ("0000:3b:00.0", 0), ("0000:9b:00.0", 1)]:
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address / "numa_node").write_text(f"{node}\n")
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").write_text(f"{4 * node}-{4 * node + 2},{8 + node}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "cores"),
    [
        ({}, {0, 1, 2, 8}),
        ({"LOCAL_RANK": "2"}, {4, 5, 6, 9}),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1, 2"}, {4, 5, 6, 9}),
        ({"LOCAL_RANK": "3"}, set()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a1b"}, set()),
    ],
)
def test_cores_of_the_gpus_numa_node(host: Path, environ: dict[str, str], cores: set[int]) -> None:
    assert cores_near_gpu(environ, host) == cores
    assert cores_near_gpu(environ, host / "elsewhere") == set()


@pytest.mark.parametrize(("own", "bound"), [(range(10), [{0, 1, 2, 8}]), (range(5), [])])
def test_a_process_is_bound_unless_it_is_already(monkeypatch, host: Path, own: range, bound: list[set[int]]) -> None:
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: calls.append(cores))
    environ: dict[str, str] = {}
    prepare_cuda(environ, None, host)
    assert calls == bound and environ == ALLOCATOR
    assert describe_cuda(environ) == f"PYTORCH_ALLOC_CONF=expandable_segments:True, {len(own)} of 10 cores"


def test_what_the_user_has_set_stays(monkeypatch, host: Path) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    parallel = ParallelConfig(model_parallel_size=2)
    for own in ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}):
        environ = own | {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "9"}
        expected = dict(environ)
        prepare_cuda(environ, parallel, host)
        assert environ == expected
    environ = {}
    prepare_cuda(environ, parallel, host / "without NVIDIA's driver")
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800"}
