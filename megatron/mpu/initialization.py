"""Initial weights that depend on the seed and the parameter alone, never on the layout."""

import hashlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.mpu.mappings import all_reduce


@dataclass(frozen=True)
class WeightInit:
    """How one weight is drawn: normal with deviation ``std``, from a stream of its own.

    ``name`` tells the weight from all others of the model; ``device`` is where the numbers are
    drawn, since CPU and GPU draw different ones from the same seed.
    """

    std: float
    seed: int
    name: str
    device: str = "cpu"

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """The whole weight in fp32; on the meta device its shape alone."""
        if torch.get_default_device().type == "meta":
            return torch.empty(shape, dtype=torch.float32)
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # torch.normal and no empty().normal_(): inside zero.Init DeepSpeed makes the latter draw in half precision.
        return torch.normal(0.0, self.std, shape, generator=generator, device=self.device, dtype=torch.float32)


def sharded_parameter(whole: Tensor, *, dim: int, group: ProcessGroup) -> nn.Parameter:
    """This rank's slice of ``whole`` along ``dim``, marked as one."""
    part = whole.chunk(group.size(), dim)[group.rank()].clone()
    return mark_sharded(nn.Parameter(part), dim)


def mark_sharded(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    """Say that ``parameter`` is a slice along ``dim``.

    DeepSpeed sums the gradient norms of parameters marked ``model_parallel`` over the tensor
    group, and counts all others once; checkpoints are merged along ``partition_dim``.
    """
    parameter.model_parallel = True
    parameter.partition_dim = dim
    return parameter


def sum_gradient(parameter: nn.Parameter, group: ProcessGroup) -> nn.Parameter:
    """Let the backward pass sum the gradient of ``parameter`` over ``group``.

    For one that every rank holds whole and uses on its part of the sequence. The sum comes before
    anything else sees the gradient: DeepSpeed's own hooks, at every stage of ZeRO, and accumulation.
    """
    if group.size() > 1:
        parameter.register_hook(partial(all_reduce, group=group))
    return parameter
