"""Set up the ranks: join the process group, choose the device, form the groups of the layout."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.config import ParallelConfig
from megatron.launch.quiet import deepspeed_silenced
from megatron.launch.rendezvous import find_rank_by_mpi, rendezvous_barrier
from megatron.parallel.layout import ParallelLayout


@contextmanager
def distributed(parallel: ParallelConfig, *, verbose: bool = False) -> Iterator[ParallelLayout]:
    """Join the other ranks, and part from them on the way out. Ranks that have joined already stay together.

    Without the parting gloo aborts now and then at the end of the process.
    """
    joins = not dist.is_initialized()
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
    if "RANK" not in os.environ:
        # Only mpirun tells no port: two runs on a host need two.
        find_rank_by_mpi(os.environ, int(os.environ.get("MASTER_PORT", "29500")))
    keeper = rendezvous_barrier(os.environ, timeout) if joins else None
    with deepspeed_silenced(verbose):
        deepspeed.init_distributed(dist_backend=_backend(parallel), timeout=timeout, verbose=verbose)
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        layout = ParallelLayout.create(parallel)
    del keeper  # torch holds the store by now
    yield layout
    if joins:
        dist.destroy_process_group()


def _backend(parallel: ParallelConfig) -> str:
    # DeepSpeed's own name for CPU is ccl, which it then replaces by gloo with a warning.
    return parallel.distributed_backend or ("gloo" if get_accelerator().device_name() == "cpu" else "nccl")
