"""The likeliest token of logits that are cut by vocabulary.

v vocabulary with its padding, t ranks of the group
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def vocab_parallel_argmax(logits: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
    """logits [.., v/t] -> the index of the largest [..], the first of equals, without gathering the logits.

    Columns from ``vocab_size`` on pad the vocabulary and take no part.
    """
    first = logits.size(-1) * group.rank()
    columns = min(max(vocab_size - first, 0), logits.size(-1))
    own = logits[..., :columns]
    largest = own.amax(-1) if columns else logits.new_full(logits.shape[:-1], -torch.inf)
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    index = own.argmax(-1) + first if columns else torch.zeros_like(overall, dtype=torch.long)
    index = index.masked_fill(largest < overall, torch.iinfo(torch.long).max)
    dist.all_reduce(index, op=dist.ReduceOp.MIN, group=group)
    return index
