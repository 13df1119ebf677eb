"""Weights that make the loss a mean: over the tokens of the global batch, however it is split, or of means."""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from megatron.data.loader import Batch


def weighted(micro_batches: Iterator[Batch], accumulated: int, group: ProcessGroup, *, masks: bool) -> Iterator[Batch]:
    """``micro_batches`` with their loss masks [b, s] scaled to weights.

    DeepSpeed averages over the ``accumulated`` micro-batches of an iteration and over the data
    ranks of ``group``. A mean of means is not the mean where ``masks`` leaves each with another
    number of tokens; so each token weighs one over the count in the whole global batch.
    """
    while batch := list(islice(micro_batches, accumulated)):
        counted = torch.stack([loss_mask.sum() for _, (_, loss_mask, *_) in batch]).sum()
        if masks:
            counted = counted.to(get_accelerator().current_device_name())
            dist.all_reduce(counted, group=group)
            counted = counted.cpu()
        else:
            counted = counted * group.size()
        scale = accumulated * group.size() / counted.clamp(min=1)
        for tokens, (labels, loss_mask, *others) in batch:
            yield Batch(tokens, (labels, loss_mask * scale, *others))


def weighted_by_micro_batch(micro_batches: Iterator[Batch]) -> Iterator[Batch]:
    """``micro_batches`` with their loss masks [b, s] scaled so that each one's loss is the mean over its own tokens.

    DeepSpeed's average of them is the classic mean of means: where micro-batches count different
    numbers of tokens, it depends on how the global batch is split.
    """
    for tokens, (labels, loss_mask, *others) in micro_batches:
        yield Batch(tokens, (labels, loss_mask / loss_mask.sum().clamp(min=1), *others))
