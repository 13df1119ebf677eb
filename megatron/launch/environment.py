"""Prepares the environment of a rank before torch is imported: variables, allocator, cores, rendezvous port.

It makes deepspeed, torchrun, mpirun and plain python equivalent. DeepSpeed reads the rank of this process from the
environment: deepspeed and torchrun set it; with mpirun DeepSpeed asks mpi4py; for plain ``python``, a world of one
process, this module sets it.
"""

import ctypes
import errno
import ipaddress
import math
import os
import random
import re
import socket
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron.common.environment import (
    check_place,
    expected_device,
    local_rank,
    on_one_host,
    rank,
    ranks_on_host,
    threads_per_rank,
    world_size,
)
from megatron.common.errors import ConfigError, LaunchError
from megatron.config import ParallelConfig

LISTEN = "MASTER_LISTEN"
"""Environment variable: address at which rank 0 listens instead of MASTER_ADDR, such as 0.0.0.0 (all interfaces).

MASTER_ADDR must lead there."""

_LOOPBACK = Path("/sys/class/net/lo")
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

_BINDING = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID")
"""Environment variables of launchers that may bind each rank to its own cores."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_PORTS = range(20000, 32000)
"""Below the ephemeral ports, which the system assigns to outgoing connections and to programs that ask for any port."""
_KEPT_BYTES, _LARGEST_KEPT_BLOCK = 2**31 - 1, 2**30
_HEARTBEAT_SECONDS = 480
"""torch's default of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC."""
_CUDA_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")


def prepare_environment(environ: MutableMapping[str, str], parallel: ParallelConfig | None = None) -> None:
    """Set environment variables that DeepSpeed and torch read, before torch is imported.

    ``parallel`` is the layout, if it is already known. Raises ConfigError if the variables that describe the rank of
    this process contradict each other, OMP_NUM_THREADS is not a number of threads, or torch is too old; LaunchError if
    rank 0 cannot listen at the rendezvous address, see ``listen``.
    """
    check_place(environ)
    check_torch(is_main_rank=not rank(environ))
    # With mpirun the address is only known later.
    if hosts_store(environ) and "MASTER_ADDR" in environ:
        listen(environ).close()
    # Otherwise DeepSpeed probes all accelerators, and logs that.
    environ["DS_ACCELERATOR"] = expected_device(environ)
    # Otherwise each lost connection prints a page of C++ stack frames after the line with the cause.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environ["TORCH_EXTENSIONS_DIR"] = extensions_folder(environ, sys.prefix)
    # Torch compiles with the first ninja in PATH. Another version of ninja, as without an activated environment, would
    # compile everything again.
    # Folders that this user cannot enter, such as root's after su, would hide that a program is not installed.
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    usable = [folder for folder in folders if os.access(folder or os.curdir, os.X_OK)]
    environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), *usable])
    if rank(environ) is None:
        port = str(free_port())
        environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # inherited from another run: there is no agent
    divide_cores(environ, ranks_on_host(environ) or world_size(environ))
    if environ["DS_ACCELERATOR"] == "cuda":
        prepare_cuda(environ, parallel)
    if environ["DS_ACCELERATOR"] == "cpu":
        keep_freed_memory(environ)
        if (ranks := ranks_on_host(environ)) is not None:
            environ.setdefault("LOCAL_SIZE", str(ranks))  # otherwise each reduction in ZeRO 3 starts numactl
    if on_one_host(environ) and _LOOPBACK.exists():
        # The default, the address of the host's name, may be reachable from other hosts.
        environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
        environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK.name)


def free_port() -> int:
    """A port on which no program listens, outside the ephemeral ports, so that no other program gets it soon.

    Raises OSError where a program cannot listen at all.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port


def divide_cores(environ: MutableMapping[str, str], ranks: int) -> None:
    """Set OMP_NUM_THREADS to this host's cores divided by its ``ranks``, unless it is set; before torch is imported.

    Ranks that each used all cores would slow each other down. A rank that its launcher binds to its own cores, as
    mpirun and Slurm do, uses only these. Raises ConfigError if OMP_NUM_THREADS is not a number of threads.
    """
    if threads_per_rank(environ) is not None:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // ranks)
    if any(name in environ for name in _BINDING):
        share = min(cores, max(1, (os.cpu_count() or 1) // ranks))
    environ["OMP_NUM_THREADS"] = str(share)


def prepare_cuda(environ: MutableMapping[str, str], parallel: ParallelConfig | None, root: Path = Path("/")) -> None:
    """Set variables that CUDA and its allocator read, unless the user has set them; before torch is imported.

    - PYTORCH_ALLOC_CONF=expandable_segments:True with NVIDIA's driver: freed memory can be reused for other sizes.
      With ROCm it can hang (https://github.com/pytorch/pytorch/issues/192259).
    - The variables of ``prepare_nccl``.
    - The CPU affinity of the process: the cores of its GPU's NUMA node, unless it is already bound to some cores.
    """
    if (root / "proc/driver/nvidia").exists() and "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if parallel is not None:
        prepare_nccl(environ, parallel)
    cores = cores_near_gpu(environ, root)
    if cores and len(os.sched_getaffinity(0)) == os.cpu_count():
        os.sched_setaffinity(0, cores)


def prepare_nccl(environ: MutableMapping[str, str], parallel: ParallelConfig) -> None:
    """Set variables that CUDA and torch's NCCL backend read, unless the user has set them.

    - CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism: kernels start in launch order, so that a
      collective starts before the matmul that it should overlap with.
    - TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: torch aborts a process whose NCCL thread shows no progress for this time. It is
      raised to the timeout of collectives, so that ``--watchdog-minutes``, which is less, reports first.
    """
    if parallel.model_parallel_size > 1 or parallel.context_parallel_size > 1:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    seconds = max(_HEARTBEAT_SECONDS, math.ceil(60 * parallel.distributed_timeout_minutes))
    environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(seconds))


def cores_near_gpu(environ: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """The cores of the NUMA node of this rank's NVIDIA GPU; empty if ``root``/sys and ``root``/proc do not have them.

    CUDA orders equal GPUs by their PCI addresses.
    """
    visible = [number.strip() for number in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    try:
        gpus = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())
        number = visible[local_rank(environ) or 0] if visible != [""] else local_rank(environ) or 0
        node = (root / "sys/bus/pci/devices" / gpus[int(number)] / "numa_node").read_text().strip()
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")
        bounds = [[int(bound) for bound in text.split("-")] for text in ranges]
    except (OSError, ValueError, IndexError):  # no NUMA node, or CUDA_VISIBLE_DEVICES has UUIDs
        return set()
    return {core for first, *last in bounds for core in range(first, (last or [first])[0] + 1)}


def describe_cuda(environ: Mapping[str, str]) -> str:
    """The variables of ``prepare_cuda`` and the number of cores, in one line."""
    settings = [f"{name}={environ[name]}" for name in _CUDA_SETTINGS if name in environ]
    return ", ".join([*settings, f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"])


def keep_freed_memory(environ: MutableMapping[str, str]) -> None:
    """Make glibc's allocator keep freed memory, in huge pages, for the next step; before torch is imported.

    Does nothing if the user has set variables of glibc or torch, or uses another allocator.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not tuned:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)


def extensions_folder(environ: Mapping[str, str], prefix: str) -> str:
    """The folder of compiled extensions: TORCH_EXTENSIONS_DIR, or one per Python environment ``prefix``.

    In torch's default folder two environments would overwrite each other's extensions, and compile at every start.
    """
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return folder
    cache = environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return os.path.join(cache, "megatron_deepspeed_extensions", prefix.strip(os.sep).replace(os.sep, "-"))


def hosts_store(environ: Mapping[str, str]) -> bool:
    """Whether this process hosts the rendezvous store: rank 0 does, unless torchrun's agent has one."""
    return rank(environ) == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def listen(environ: Mapping[str, str]) -> socket.socket:
    """A socket that listens only at the rendezvous address; torch's store would listen on all interfaces.

    Raises LaunchError if the address does not belong to this host, other hosts cannot reach it, or the port is in use
    or privileged.
    """
    name, port = environ.get(LISTEN) or environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: the name is too long
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"{name}, where rank 0 is to listen, does not resolve ({reason}): set MASTER_ADDR to an address of its host"
        ) from error
    other_hosts = ranks_on_host(environ) is not None and not on_one_host(environ)
    for family, _, _, _, address in addresses:
        if other_hosts and ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise LaunchError(
                f"{name} is {address[0]} on its own host, where ranks of other hosts do not reach it: set MASTER_ADDR "
                f"to an address in the network of the run, or {LISTEN}=0.0.0.0 to listen on all interfaces"
            )
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno in _NOT_LOCAL:
                continue
            raise LaunchError(
                f"port {port} of the rendezvous cannot be opened ({error.strerror}): an earlier run may still use it, "
                f"see ss -ltnp 'sport = :{port}'; end it, or choose another port with --master_port (deepspeed) or "
                "MASTER_PORT"
            ) from error
    raise LaunchError(
        f"{name}, where rank 0 is to listen, is not an address of its host {socket.gethostname()}: set MASTER_ADDR to "
        f"one, or, if another host forwards it here, {LISTEN}=0.0.0.0"
    )


OLDEST_TORCH = "2.10"
NEWEST_TORCH = "2.15"
"""Oldest and newest supported version, both tested with every release: tests/torch_versions.sh."""


def check_torch(*, is_main_rank: bool) -> None:
    """Raise ConfigError if torch is too old; on the main rank, warn if it is newer than the newest tested version."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return  # importing it will fail with a clear error
    if _minor(installed) < _minor(OLDEST_TORCH):
        raise ConfigError(
            f"torch {installed} is installed, but {OLDEST_TORCH} to {NEWEST_TORCH} are supported: "
            "pip install -r requirements.txt"
        )
    if is_main_rank and _minor(installed) > _minor(NEWEST_TORCH):
        print(
            f"warning: torch {installed} is newer than {NEWEST_TORCH}, the newest version that was tested",
            file=sys.stderr,
            flush=True,
        )


def _minor(text: str) -> tuple[int, ...]:
    """Major and minor version as numbers, such as (2, 12) for 2.12.0a0+5228986c39.nv26.05."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
