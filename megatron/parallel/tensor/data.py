"""Data for ranks that cannot read it themselves."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, dtype: torch.dtype, group: ProcessGroup
) -> dict[str, Tensor]:
    """Send the tensors named ``keys`` from the first rank of the group to the others.

    ``data`` matters on that rank only. Shapes travel along, so no other rank need know them; all
    tensors travel in one message of type ``dtype``.

    Raises ValueError on the first rank if a tensor is of another type.
    """
    device = get_accelerator().current_device_name()
    source = dist.get_global_rank(group, 0)
    if group.rank() == 0:
        for key in keys:
            if data[key].dtype != dtype:
                raise ValueError(f"broadcast_data: {key} is {data[key].dtype}, not {dtype}")
    shapes = [[tuple(data[key].shape) for key in keys] if group.rank() == 0 else None]
    dist.broadcast_object_list(shapes, src=source, group=group)
    sizes = [torch.Size(shape).numel() for shape in shapes[0]]
    if group.rank() == 0:
        flat = torch.cat([data[key].reshape(-1) for key in keys]).to(device)
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    dist.broadcast(flat, src=source, group=group)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(sizes), shapes[0], strict=True)}
