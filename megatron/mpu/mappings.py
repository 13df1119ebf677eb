"""Tensor-parallel mappings with Megatron-LM's names and arguments and an implicit group."""

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.tensor import mappings

from .initialize import get_tensor_model_parallel_group


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Identity forward, all-reduce backward."""
    return mappings.copy_to_model_parallel_region(input_, group or get_tensor_model_parallel_group())


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """All-reduce forward, identity backward."""
    return mappings.reduce_from_model_parallel_region(input_, group or get_tensor_model_parallel_group())


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Keep this rank's part of the last dimension forward, all-gather backward: [.., i] -> [.., i/t]."""
    return mappings.scatter_to_model_parallel_region(input_, group or get_tensor_model_parallel_group())


def gather_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """All-gather the last dimension forward, keep this rank's part backward: [.., o/t] -> [.., o]."""
    return mappings.gather_from_model_parallel_region(input_, group or get_tensor_model_parallel_group())


def scatter_to_sequence_parallel_region(input_: Tensor, group: ProcessGroup | None = None, dim: int = 0) -> Tensor:
    """Keep this rank's part of the sequence, ``dim``, forward, all-gather backward: [s, ..] -> [s/t, ..]."""
    return mappings.scatter_to_sequence_parallel_region(input_, group or get_tensor_model_parallel_group(), dim)


def gather_from_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, dim: int = 0, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """All-gather the sequence forward, reduce-scatter backward: [s/t, ..] -> [s, ..].

    Without ``tensor_parallel_output_grad`` the gradient must be equal on all ranks, and each rank keeps its part.
    """
    group = group or get_tensor_model_parallel_group()
    if tensor_parallel_output_grad:
        return mappings.gather_from_sequence_parallel_region(input_, group, dim)
    gathered = mappings.gather_from_model_parallel_region(input_.movedim(dim, -1), group)
    return gathered.movedim(-1, dim)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None, dim: int = 0
) -> Tensor:
    """Reduce-scatter the sequence forward, all-gather backward: [s, ..] -> [s/t, ..]."""
    return mappings.reduce_scatter_to_sequence_parallel_region(input_, group or get_tensor_model_parallel_group(), dim)


# The names of Megatron-LM 1.
copy_to_model_parallel_region = copy_to_tensor_model_parallel_region
reduce_from_model_parallel_region = reduce_from_tensor_model_parallel_region
scatter_to_model_parallel_region = scatter_to_tensor_model_parallel_region
gather_from_model_parallel_region = gather_from_tensor_model_parallel_region
