"""What a rank sets before torch is imported, unless the user has set it: threads, CUDA's variables, the allocator."""

import base64
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA

from megatron.common.errors import ConfigError
from megatron.config import ParallelConfig
from megatron.launch import environment
from megatron.launch.environment import (
    cores_near_gpu,
    describe_cuda,
    divide_cores,
    prepare_cuda,
    prepare_environment,
    prepare_nccl,
)

MPIRUN = {"OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("own", "ranks", "variables", "threads"),
    [
        (16, 1, {}, "16"),
        (16, 4, {}, "4"),
        (16, 5, {}, "3"),
        (2, 4, {}, "1"),
        (4, 2, {}, "2"),  # of a container
        (1, 2, MPIRUN, "1"),  # bound to a core
        (8, 2, MPIRUN, "8"),  # bound to eight
        (16, 4, MPIRUN, "4"),  # not bound
        (16, 4, {"OMP_NUM_THREADS": ""}, "4"),
        (16, 4, {"OMP_NUM_THREADS": "7"}, "7"),
        (16, 4, {"OMP_NUM_THREADS": "4,2"}, "4,2"),  # of nested parallel regions
    ],
)
def test_ranks_share_the_cores_of_their_host(monkeypatch, own, ranks, variables, threads) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(own))
    environ = dict(variables)
    divide_cores(environ, ranks)
    assert environ["OMP_NUM_THREADS"] == threads


def test_folders_of_programs_that_this_user_cannot_enter_are_left_out(monkeypatch) -> None:
    """Else a program that is not installed, such as DeepSpeed's numactl, is not missing but not permitted."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/locked" and access(path, mode))
    prepare_environment(environ := {"PATH": "/locked:/usr/bin:"})
    assert environ["PATH"].split(os.pathsep)[1:] == ["/usr/bin", ""]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
def test_every_program_sets_its_threads(device) -> None:
    environ = dict(device)
    prepare_environment(environ)
    assert int(environ["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["0", "-1", "four", "100000", "2.5", "4,0", "9" * 30])
def test_what_is_no_number_of_threads_is_an_error(text) -> None:
    """OpenMP ignores some of these with a line per process, and starts as many threads for others."""
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS={text}: set a whole number from 1 to 1024, or unset it"):
        prepare_environment({**CPU, "OMP_NUM_THREADS": text})


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


@pytest.mark.parametrize(("minutes", "seconds"), [(5.0, "480"), (30.0, "1800")])
def test_what_nccl_and_the_allocator_read_is_set_unless_the_user_has(
    monkeypatch, host: Path, minutes: float, seconds: str
) -> None:
    parallel = ParallelConfig(distributed_timeout_minutes=minutes, model_parallel_size=2)
    environ: dict[str, str] = {}
    prepare_nccl(environ, parallel)
    assert environ == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": seconds}
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "9"}
    environ = dict(own)
    prepare_nccl(environ, parallel)
    assert environ == own
    environ = {}
    prepare_nccl(environ, ParallelConfig())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environ, "there is nothing to overlap without tensor parallelism"
    prepare_nccl(environ, ParallelConfig(context_parallel_size=2, world_size=2))
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    for allocator in ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}):
        environ = own | allocator
        prepare_cuda(environ, parallel, host)
        assert environ == own | allocator


FAULTS_OF_A_STEP = """
import ctypes, os, resource
from megatron.launch.environment import keep_freed_memory
keep_freed_memory(os.environ)
libc, block = ctypes.CDLL(None), ctypes.c_void_p()
def step():  # as torch's allocator for CPUs
    assert libc.posix_memalign(ctypes.byref(block), 64, 1 << 26) == 0
    ctypes.memset(block, 1, 1 << 26)
    libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    "variables, kept", [({}, True), ({"MALLOC_TOP_PAD_": "0", "THP_MEM_ALLOC_ENABLE": "0"}, False)]
)
def test_freed_block_is_reused(variables: dict[str, str], kept: bool):
    """64 MiB are 16,384 pages, each a fault where the block is new; a user's own setting stands."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_A_STEP], env={"PATH": "", **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 24_576) == kept  # half of three steps; a busy kernel may take a block back once


@pytest.mark.parametrize(
    ("installed", "ending"),
    [
        ("2.8.0a0+5228986c39.nv25.06", "error"),
        ("2.9.1", "error"),
        ("1.13.1", "error"),
        ("2.10.0a0+b4e4ee81d3.nv25.12", ""),
        ("2.12.0a0+5228986c39.nv26.05", ""),
        ("2.15.1", ""),
        ("3.0.0", "warning"),
    ],
)
def test_versions_of_torch(installed: str, ending: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(environment, "version", lambda package: installed)
    with pytest.raises(ConfigError, match=installed.split("+")[0]) if ending == "error" else nullcontext():
        environment.check_torch(is_main_rank=True)
    assert bool(capsys.readouterr().err) == (ending == "warning")


RANK = """
import os
from megatron.common.environment import ranks_on_host
from megatron.launch.environment import hosts_store
from megatron.launch.rank import run_rank
def report():
    # One write: print makes two, between which another rank can write.
    os.write(1, f"of {ranks_on_host(os.environ)}, hosts the store: {hosts_store(os.environ)}\\n".encode())
run_rank(report)
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "outer", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("launcher", "seen"),
    [
        (("-m", "deepspeed.launcher.launch"), ["of 2, hosts the store: False", "of 2, hosts the store: True"]),
        (("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"), ["of 1, hosts the store: False"]),
    ],
)
def test_ranks_of_deepspeed_below_torchrun_have_their_own_store(programs, tmp_path, launcher, seen) -> None:
    """And those of a torchrun below DeepSpeed's launcher that of its agent."""
    (tmp_path / "rank.py").write_text(RANK)
    world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    flags = [f"--world_info={world}"] if "deepspeed" in launcher[1] else []
    outer = TORCHRUN if flags else {"CROSS_RANK": "0", "LOCAL_SIZE": "1"}
    environ = {**outer, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(programs.root)}
    done = programs.python(*launcher, *flags, tmp_path / "rank.py", **environ).ok()
    assert sorted(line for line in done.output.splitlines() if line.startswith("of ")) == seen
