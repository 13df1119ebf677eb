"""Started on each rank by ``faults.py``: what any torch script does between ranks, and nothing to notice a fault by."""

import time
from itertools import count

import torch
import torch.distributed as dist


def main() -> None:
    """All-reduce forever, and print each iteration."""
    dist.init_process_group("gloo")
    numbers = torch.ones(1000)
    for iteration in count(1):
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"iteration {iteration}", flush=True)
        time.sleep(0.02)


main()
