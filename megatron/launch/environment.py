"""The same start under deepspeed, torchrun, mpirun and plain python.

DeepSpeed asks the environment who this process is. deepspeed and torchrun fill it in; under mpirun
DeepSpeed finds out through mpi4py; a plain ``python`` is a world of one, and this file says so.
"""

import ctypes
import os
import socket
import sys
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

from megatron.config.environment import check_place, expected_device, on_one_host, rank, ranks_on_host, world_size
from megatron.launch.cache import extensions_folder
from megatron.launch.port import check_port

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""
_KEPT_BYTES = 2**31 - 1
_LARGEST_KEPT_BLOCK = 2**30


def keep_freed_memory(environ: MutableMapping[str, str]) -> None:
    """Let this process keep what it frees, in huge pages; before torch is imported.

    What the user has set himself, by glibc's or torch's variables, stays; so does another allocator than glibc's.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not tuned:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK)


_LOOPBACK = Path("/sys/class/net/lo")


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Fill in what DeepSpeed and torch would otherwise guess, warn about or fail without.

    Raises:
        ConfigError: what the environment says of this process's place among the others makes no sense.
        LaunchError: the address or the port that the ranks are to meet at cannot be had.
    """
    check_place(environ)
    check_port(environ)
    # Without it DeepSpeed tries one accelerator after the other, and says so.
    environ.setdefault("DS_ACCELERATOR", expected_device(environ))
    environ["TORCH_EXTENSIONS_DIR"] = extensions_folder(environ, sys.prefix)
    # Torch compiles with the first ninja on the path. One of another version than the last time's, as on
    # a start without the environment being active, would compile everything anew.
    environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", os.defpath)])
    if rank(environ) is None:
        environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    if "LOCAL_SIZE" in environ:
        # deepspeed's word. On the CPU it makes DeepSpeed leave 66 MiB of shared memory behind for each rank, which
        # nothing in training uses.
        environ.setdefault("LOCAL_WORLD_SIZE", environ.pop("LOCAL_SIZE"))
    if environ["DS_ACCELERATOR"] == "cpu":
        # Ranks on one host share its cores; each with all of them would spend its time in waiting.
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _neighbours(environ))))
        keep_freed_memory(environ)
    if on_one_host(environ) and _LOOPBACK.exists():
        # Left to themselves they listen at the address of the host's name, which others may reach.
        environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)
        environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK.name)


def _neighbours(environ: MutableMapping[str, str]) -> int:
    """Processes on this host, this one among them; as many as there can be, where no launcher says."""
    return ranks_on_host(environ) or world_size(environ)


def _free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])
