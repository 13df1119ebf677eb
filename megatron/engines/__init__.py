"""Everything that replaces or works around a part of DeepSpeed or torch.distributed.

Each entry states where the part is in DeepSpeed ``TESTED_VERSION``, what it does there, the test that fails without
the entry, and when the entry can be removed. Nothing outside of this package replaces attributes of DeepSpeed's
objects, except for its launcher, which imports neither torch nor this package: ``megatron/tools/cluster/`` has
``deepspeed_launcher.py`` for it, in the same form.
"""

import importlib
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

TESTED_VERSION = "0.19.8"
"""The version of DeepSpeed that the entries are for."""

_KNOWN_WARNINGS = (
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "c10d::broadcast_",
    r"barrier\(\): using the device under current context",
)


def warn_if_untested_version(*, is_main_rank: bool) -> None:
    """Print one warning on the main rank if DeepSpeed has another version than the tested one."""
    import deepspeed

    if is_main_rank and deepspeed.__version__ != TESTED_VERSION:
        print(
            f"warning: DeepSpeed {deepspeed.__version__} is installed, but this suite was tested with "
            f"{TESTED_VERSION}, parts of which it replaces: see megatron/engines",
            file=sys.stderr,
            flush=True,
        )


def discover_mpi_ranks(port: int) -> None:
    """Set the environment variables of this rank under mpirun, with the local rank that Open MPI has given it.

    DeepSpeed: comm/comm.py, ``mpi_discovery`` numbers the ranks of a host in the order of their global ranks, while
    Open MPI may number them otherwise; then the constructor in runtime/engine.py asserts that the numbers are equal.
    Test: tests/engines/test_deepspeed.py. Remove when ``mpi_discovery`` reads OMPI_COMM_WORLD_LOCAL_RANK.
    """
    from deepspeed.comm import comm

    comm.mpi_discovery(distributed_port=port, verbose=False)
    if local_rank := os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"):
        os.environ["LOCAL_RANK"] = local_rank


def silence_known_warnings() -> None:
    """Filter, by message, warnings of torch that every run would print.

    DeepSpeed: comm/torch.py and runtime/pipe/p2p.py call deprecated functions of torch.distributed, and barrier() on a
    GPU without its number, which set_device() has set.
    Test: tests/launch/test_launchers.py, tests/launch/test_timeouts.py. Remove when DeepSpeed no longer does so.
    """
    for message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=f"(?s).*{message}")


def nothing_compiled_for_collectives() -> None:
    """Let DeepSpeed start on a CPU without compiling its all-reduce for inference, which training does not call.

    DeepSpeed: comm/torch.py, the constructor of TorchBackend compiles and loads ``deepspeed_shm_comm``: 20 seconds in
    each new environment, and for each rank that the launcher gives LOCAL_SIZE 66 MiB of /dev/shm that outlive the run.
    Without it ``inference_all_reduce()`` is torch's all-reduce.
    Test: tests/bad_input/test_extension_cache.py. Remove when ``inference_all_reduce()`` itself compiles it.
    """
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def devices_counted_once() -> None:
    """Let DeepSpeed count the devices of a machine without accelerators once in a process.

    DeepSpeed: accelerator/cpu_accelerator.py, ``device_count()`` starts ``numactl --hardware`` each time, unless the
    launcher has set LOCAL_SIZE; ``__avg_scatter_grads`` in runtime/zero/stage3.py calls it in every reduction.
    Test: tests/engines/test_deepspeed.py. Remove when ``device_count()`` remembers its answer.
    """
    numa = importlib.import_module("deepspeed.utils.numa")
    numa.get_numa_cores = cache(numa.get_numa_cores)  # type: ignore[attr-defined]


def cpu_known_at_once() -> None:
    """Let DeepSpeed's builders and its Adam for CPUs read in /proc what kind of processor this is.

    DeepSpeed: ops/op_builder/builder.py and ops/adam/cpu_adam.py ask py-cpuinfo three times, which each time starts a
    Python that measures the clock rate for more than a second. Where /proc is another's, py-cpuinfo is asked as before.
    Test: tests/engines/test_deepspeed.py. Remove when DeepSpeed asks once, or the kernel.
    """
    import cpuinfo

    known = _cpu_of_kernel(Path("/proc/cpuinfo"))
    if known is not None:
        cpuinfo.get_cpu_info = lambda: dict(known)


def _cpu_of_kernel(file: Path) -> dict[str, Any] | None:
    """The fields of py-cpuinfo that DeepSpeed reads, of an x86 processor under Linux; None for others."""
    if platform.machine() != "x86_64" or not file.exists():
        return None
    lines = (line.partition(":") for line in file.read_text().splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    if not {"vendor_id", "flags"} <= fields.keys():
        return None
    return {"arch": "X86_64", "vendor_id_raw": fields["vendor_id"], "flags": sorted(fields["flags"].split())}


def set_groups_of_deepspeed(timeout: timedelta, backend: str | None = None) -> None:
    """Give the process groups that DeepSpeed forms from now on, such as the pipeline engine's, timeout and backend.

    DeepSpeed: comm/torch.py, TorchBackend.new_group() passes neither, so that a group gets torch's timeout, 10 minutes
    with NCCL, and the backend of the default group.
    Test: tests/launch/test_timeouts.py. Remove when new_group() takes them, or passes those of init_distributed().
    """
    import torch.distributed as dist
    from deepspeed import comm

    comm.comm.cdb.new_group = partial(dist.new_group, timeout=timeout, backend=backend)


@contextmanager
def deepspeed_silenced(verbose: bool) -> Iterator[None]:
    """Keep the prints of DeepSpeed and of gloo (from C++) off stdout. DeepSpeed's errors stay.

    With ``verbose`` nothing is kept off, and DeepSpeed's logger prints its information, too.

    DeepSpeed: prints hundreds of lines while an engine is built, some of them not through its logger.
    Test: tests/launch/test_launchers.py. Remove when one log level silences all of it.
    """
    if verbose:
        from deepspeed.utils.logging import set_log_level_from_string

        set_log_level_from_string("info")
        yield
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.stdout.flush()
    screen = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(screen, 1)
        os.close(screen)
