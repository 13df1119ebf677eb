"""Started by ``benchmarks/gpu`` on each GPU of a host: how fast the links between GPUs are, and those to host memory.

Reports for each operation and size of its message the seconds, and the bus bandwidth as nccl-tests define it, which is
that of a link whatever the number of ranks. Copies to and from the host run on all GPUs at once, as in a checkpoint;
the slowest rank counts.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from benchmarks.measures.ranks import report
from megatron.config import ParallelConfig
from megatron.launch.distributed import distributed

MIB = 1 << 20
REPEATS, WARM_UP = 10, 3
Operation = tuple[str, Callable[[], Any], float]
"""Name, what runs it, and bytes on the bus for each byte of the message."""


def main() -> None:
    """Time all operations on messages of so many MiB as the arguments say."""
    sizes = [int(word) * MIB for word in sys.argv[1:]]
    ranks = int(os.environ["WORLD_SIZE"])
    with distributed(ParallelConfig(world_size=ranks)):
        rows = [row(ranks, size, *operation) for size in sizes for operation in operations(ranks, size)]
        if dist.get_rank() == 0:
            report({"links": rows, "ranks": ranks})


def operations(ranks: int, size: int) -> Iterator[Operation]:
    """All operations on a message of ``size`` bytes: for gathers and scatters that of all ranks together."""
    accelerator = get_accelerator()
    device = accelerator.current_device_name()
    message, share = (torch.zeros(size // (2 * n), dtype=torch.bfloat16, device=device) for n in (1, ranks))
    message = message[: share.numel() * ranks]
    if ranks > 1:
        part = (ranks - 1) / ranks
        yield "all-reduce", lambda: dist.all_reduce(message), 2 * part
        yield "all-gather", lambda: dist.all_gather_into_tensor(message, share), part
        yield "reduce-scatter", lambda: dist.reduce_scatter_tensor(share, message), part
        yield "to the next GPU", partial(to_next, message, torch.empty_like(message)), 1
    yield "copy on the GPU", partial(torch.empty_like(message).copy_, message), 2
    pinned = accelerator.pin_memory(torch.zeros(message.shape, dtype=message.dtype))
    yield "GPU to pinned memory", lambda: pinned.copy_(message, non_blocking=True), 1
    yield "pinned memory to GPU", lambda: message.copy_(pinned, non_blocking=True), 1
    pageable = torch.zeros_like(message, device="cpu")
    yield "GPU to pageable memory", lambda: pageable.copy_(message), 1


def to_next(message: Tensor, received: Tensor) -> None:
    """Send to the next rank of a ring, and receive from the previous one, as stages of a pipeline do."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, message, (rank + 1) % ranks), dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv(list(sends)):
        work.wait()


def row(ranks: int, size: int, name: str, run: Callable[[], Any], bus: float) -> dict[str, Any]:
    """Seconds of one operation, on the slowest rank, and its bus bandwidth."""
    accelerator = get_accelerator()
    for _ in range(WARM_UP):
        run()
    accelerator.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        run()
    accelerator.synchronize()
    seconds = torch.tensor((time.perf_counter() - begin) / REPEATS, device=accelerator.current_device_name())
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {"operation": name, "bytes": size, "seconds": float(seconds), "bandwidth": bus * size / float(seconds)}


if __name__ == "__main__":
    main()
