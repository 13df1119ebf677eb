"""Where the optimizer of a running engine keeps what a rank has of each parameter.

The base optimizer steps on *masters*: fp32 tensors that are the parameters themselves, copies of them, or flat
tensors with many parameters, of which ZeRO gives each data-parallel rank a part.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Fragment(NamedTuple):
    """``length`` elements of a parameter from ``begin`` on lie in ``master`` from ``start`` on, both taken as flat."""

    master: Tensor
    start: int
    begin: int
    length: int


def fragments(engine: DeepSpeedEngine) -> dict[nn.Parameter, Fragment]:
    """The fragment of each parameter of which this rank's optimizer has one."""
    for mark, kind in _WRAPPERS.items():
        if hasattr(engine.optimizer, mark):
            return dict(kind(engine.optimizer))
    parameters = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    return {parameter: Fragment(parameter, 0, 0, parameter.numel()) for parameter in parameters}


def parameter_shapes(engine: DeepSpeedEngine) -> list[dict[str, torch.Size]]:
    """Name and shape of the parameters in each of the optimizer's groups, in its order; without ZeRO."""
    optimizer = engine.optimizer
    wrapped = getattr(optimizer, "fp16_groups", None) or getattr(optimizer, "bf16_groups", None)
    groups = wrapped or [group["params"] for group in optimizer.param_groups]
    return [{engine.param_names[parameter]: parameter.shape for parameter in group} for group in groups]


def _zero3(optimizer: Any) -> Iterator[tuple[nn.Parameter, Fragment]]:
    """Equal parts of each parameter, of which the last ones may be padding."""
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        for parameter in group:
            _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            begin = length * dist.get_rank(parameter.ds_process_group)
            length = min(length, parameter.ds_numel - begin)
            if length > 0:
                yield parameter, Fragment(master, start, begin, length)


def _zero1_and_2(optimizer: Any) -> Iterator[tuple[nn.Parameter, Fragment]]:
    # Not by DeepSpeed's links between parameters and masters: with round-robin gradients they miss the order.
    offsets = optimizer.round_robin_bit16_offsets
    masters = optimizer.single_partition_of_fp32_groups
    return _partitions(optimizer.round_robin_bit16_groups, offsets, masters, optimizer.real_dp_process_group)


def _bf16(optimizer: Any) -> Iterator[tuple[nn.Parameter, Fragment]]:
    groups = optimizer.bf16_groups
    offsets = [list(accumulate((p.numel() for p in group), initial=0))[:-1] for group in groups]
    return _partitions(groups, offsets, optimizer.fp32_groups_flat_partition, optimizer.real_dp_process_group)


def _partitions(
    groups: Sequence[Sequence[nn.Parameter]],
    offsets: Sequence[Sequence[int]],
    masters: Sequence[Tensor],
    data_groups: Sequence[ProcessGroup],
) -> Iterator[tuple[nn.Parameter, Fragment]]:
    """Each data-parallel rank has an equal part of a group's flat tensor, in which parameters begin at ``offsets``."""
    for group, begins, master, ranks in zip(groups, offsets, masters, data_groups, strict=True):
        part = dist.get_rank(ranks) * master.numel()
        for parameter, offset in zip(group, begins, strict=True):
            begin = max(part - offset, 0)
            end = min(part + master.numel() - offset, parameter.numel())
            if begin < end:
                yield parameter, Fragment(master, offset + begin - part, begin, end - begin)


def _fused(optimizer: Any) -> Iterator[tuple[nn.Parameter, Fragment]]:
    for group, master in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        start = 0
        for parameter in group:
            yield parameter, Fragment(master, start, 0, parameter.numel())
            start += parameter.numel()


def _unfused(optimizer: Any) -> Iterator[tuple[nn.Parameter, Fragment]]:
    for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(group, masters, strict=True):
            yield parameter, Fragment(master, 0, 0, parameter.numel())


_WRAPPERS: dict[str, Callable[[Any], Iterator[tuple[nn.Parameter, Fragment]]]] = {
    "fp32_partitioned_groups_flat": _zero3,
    "single_partition_of_fp32_groups": _zero1_and_2,
    "fp32_groups_flat_partition": _bf16,
    "fp32_groups_flat": _fused,
    "fp32_groups": _unfused,
}
"""DeepSpeed's wrappers around an optimizer by an attribute that each has alone; in fp32 without ZeRO there is none."""
