"""Cross entropy of logits that are cut by vocabulary.

b batch, s sequence, v vocabulary with its padding, t ranks of the group
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup, vocab_size: int | None = None
) -> Tensor:
    """logits [b, s, v/t], labels [b, s] -> loss [b, s], without gathering the logits.

    Columns from ``vocab_size`` on pad the vocabulary and take no part.
    """
    first = logits.size(-1) * group.rank()
    columns = logits.size(-1) if vocab_size is None else min(max(vocab_size - first, 0), logits.size(-1))
    return _CrossEntropy.apply(logits, labels - first, columns, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, local_labels: Tensor, columns: int, group: ProcessGroup) -> Tensor:
        counted = logits[..., :columns]
        largest = counted.amax(-1) if columns else logits.new_full(logits.shape[:-1], -torch.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = counted - largest.unsqueeze(-1)

        elsewhere = (local_labels < 0) | (local_labels >= columns)
        index = local_labels.masked_fill(elsewhere, 0).unsqueeze(-1)
        chosen = shifted.gather(-1, index).squeeze(-1) if columns else torch.zeros_like(largest)
        chosen = chosen.masked_fill(elsewhere, 0.0)
        weights = shifted.exp_()  # shifted is ours, and is not needed again
        sums = torch.stack([chosen, weights.sum(-1)])
        dist.all_reduce(sums, group=group)

        ctx.save_for_backward(weights.div_(sums[1].unsqueeze(-1)), index, elsewhere)
        ctx.padding = logits.size(-1) - columns
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, elsewhere = ctx.saved_tensors
        grad_logits = probabilities.clone()
        if grad_logits.size(-1):
            grad_logits.scatter_add_(-1, index, elsewhere.unsqueeze(-1).to(grad_logits.dtype) - 1)
        grad_logits *= grad.unsqueeze(-1)
        return torch.nn.functional.pad(grad_logits, (0, ctx.padding)), None, None, None
