"""Show the communication of tensor parallelism: what each rank holds before and after each mapping, and the gradients.

    torchrun --nproc_per_node 2 examples/show_communication.py    (or 4)
    python examples/show_communication.py                         starts two ranks itself

The gradient of an output is 10 x (rank + 1) on every rank, so that sums over ranks are visible. Needs no GPU.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.common.environment import rank, world_size
from megatron.config import ParallelConfig
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import run_rank


def main() -> None:
    """What each rank does."""
    prepare_environment(os.environ)  # before torch is imported

    import torch

    from megatron.engines import silence_known_warnings
    from megatron.launch.distributed import distributed
    from megatron.mpu import broadcast_data
    from megatron.parallel.tensor.mappings import (
        copy_to_model_parallel_region,
        gather_from_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    silence_known_warnings()
    size = world_size(os.environ)
    with distributed(ParallelConfig(model_parallel_size=size, world_size=size)) as layout:
        group = layout.get_model_parallel_group()

        heading("broadcast_data: rank 0's tensors on every rank")
        data = {"text": torch.arange(4), "labels": torch.arange(1, 5)} if group.rank() == 0 else None
        in_order(group, before=data, after=broadcast_data(["text", "labels"], data, torch.int64, group))

        equal = torch.arange(2.0 * size)  # the same on every rank
        own = torch.arange(2.0) + 100 * group.rank()  # another on each rank
        partial = torch.arange(2.0 * size) + 100 * group.rank()
        for title, mapping, x in (
            ("copy_to: forward identity, backward all-reduce", copy_to_model_parallel_region, equal),
            ("reduce_from: forward all-reduce, backward identity", reduce_from_model_parallel_region, own),
            ("scatter_to: forward split, backward all-gather", scatter_to_model_parallel_region, equal),
            ("gather_from: forward all-gather, backward split", gather_from_model_parallel_region, own),
        ):
            show(title, mapping, x, group)
        for title, mapping, x in (
            ("scatter_to: forward split, backward all-gather", scatter_to_sequence_parallel_region, equal),
            ("gather_from: forward all-gather, backward reduce-scatter", gather_from_sequence_parallel_region, own),
            (
                "reduce_scatter_to: forward reduce-scatter, backward all-gather",
                reduce_scatter_to_sequence_parallel_region,
                partial,
            ),
        ):
            show(f"sequence parallel, {title}", mapping, x, group, 0)  # 0 is the dimension of the sequence


def show(title, mapping, x, group, *dim):
    """Apply a mapping forward and backward, and print both."""
    heading(title)
    x = x.clone().requires_grad_()
    y = mapping(x, group, *dim)
    gradient = 10.0 * (group.rank() + 1) * y.detach().new_ones(y.shape)
    y.backward(gradient)
    in_order(group, before=x, after=y, gradient_of_output=gradient, gradient_of_input=x.grad)


def heading(title):
    """Print a title, on rank 0 only."""
    if not rank(os.environ):
        print(f"\n{title}", flush=True)


def in_order(group, **tensors):
    """Print the tensors of every rank, in the order of ranks."""
    import torch.distributed as dist

    lines = [None] * group.size()
    dist.all_gather_object(lines, "  ".join(f"{name} {as_text(value)}" for name, value in tensors.items()), group=group)
    if group.rank() == 0:
        for number, line in enumerate(lines):
            print(f"  rank {number}: {line}", flush=True)


def as_text(value):
    """A tensor as a list of numbers, and a dictionary of them."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(tensor)}" for key, tensor in value.items())
    return "nothing" if value is None else str([round(number) for number in value.tolist()])


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_known_args()
    if rank(os.environ) is None:  # no launcher has started this process: start one
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        os.execv(sys.executable, [*launcher, __file__])
    run_rank(main)
