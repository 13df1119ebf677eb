"""Vocabulary-parallel cross entropy with Megatron-LM's arguments and an implicit group."""

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.tensor import cross_entropy

from .initialize import get_tensor_model_parallel_group


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """logits [b, s, v/t], target [b, s] -> loss [b, s] in fp32, without gathering the logits."""
    group = group or get_tensor_model_parallel_group()
    return cross_entropy.vocab_parallel_cross_entropy(vocab_parallel_logits, target, group)
