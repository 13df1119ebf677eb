"""What differs where each rank holds its part of the sequence.

Two groups may cut it: the sequence group whatever it is, but for the heads of attention (DeepSpeed-Ulysses),
and then the tensor group what it does not cut otherwise (Megatron's sequence parallelism).

b batch, s sequence, or its part on this rank's sequence group, h hidden, t tensor-parallel size
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.config import ModelConfig
from megatron.model.kernels import layer_norm_class
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import sum_gradient
from megatron.parallel.tensor.mappings import (
    copy_to_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_sequence_parallel_region,
)


def cut_dim(config: ModelConfig, layout: ParallelLayout) -> int | None:
    """The dimension along which hidden states are cut between the layers' parallel parts; None where they are whole.

    Cut they are [b, s/t, h], or [s/t, b, h] as ``sequence_dim`` says.
    """
    return config.sequence_dim if layout.sequence_parallel else None


def own_part(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """The part of ``x`` along ``dim`` that is this rank's of ``group``; all of it where no group cuts."""
    return x if group is None else scatter_to_sequence_parallel_region(x, group, dim)


def cutting_groups(layout: ParallelLayout) -> list[ProcessGroup]:
    """The groups that cut the sequence, in the order in which they do."""
    tensor_group = layout.tensor_group if layout.sequence_parallel else None
    return [group for group in (layout.sequence_group, tensor_group) if group is not None]


def first_token(hidden: Tensor, layout: ParallelLayout, dim: int) -> Tensor:
    """hidden [b, s, h], or this rank's part of it -> the first token of the whole sequence [b, h], on every rank."""
    first = hidden.select(dim, 0)
    for group in cutting_groups(layout):
        first = reduce_from_model_parallel_region(first * (group.rank() == 0), group)
    if layout.sequence_group:  # whose ranks' gradients are averaged: the one that has the token needs those of all
        first = copy_to_model_parallel_region(first, layout.sequence_group)
    return first


def stream_norm_class(config: ModelConfig, layout: ParallelLayout) -> type[nn.Module]:
    """A layer norm for hidden states between the layers' parallel parts, made from (size, eps=...)."""
    norm = layer_norm_class(config)
    return _on_a_part(norm, layout.tensor_group) if layout.sequence_parallel else norm


def _on_a_part(norm: type[nn.Module], group: ProcessGroup) -> type[nn.Module]:
    class SequenceParallelLayerNorm(norm):
        """Weights whole on every rank, and so the sum of what each rank's part of the sequence says of them."""

        def __init__(self, size: int, eps: float):
            super().__init__(size, eps=eps)
            for parameter in self.parameters():
                sum_gradient(parameter, group)

    return SequenceParallelLayerNorm
