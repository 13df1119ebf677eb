"""How well a model predicts samples, shared out among the ranks.

b batch, s inputs of the longest sample of a batch, v padded vocabulary, t tensor-parallel size
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.evaluation.samples import Sample
from megatron.evaluation.stages import Forward
from megatron.evaluation.tasks import Scores
from megatron.mpu.argmax import vocab_parallel_argmax
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.layout import ParallelLayout


class Padded(NamedTuple):
    """Samples beside each other. What pads them stands behind their tokens, where causal attention never looks."""

    tokens: Tensor
    """int64 [b, s]"""
    labels: Tensor
    """int64 [b, s]"""
    predicted: Tensor
    """Which labels count: bool [b, s]"""


@torch.no_grad()
def score(
    forward: Forward,
    samples: Sequence[Sample],
    layout: ParallelLayout,
    *,
    batch_size: int,
    vocab_size: int,
    report: Callable[[int], object] = lambda done: None,
) -> Scores:
    """The scores of all samples, on every rank.

    Batches are the same whatever the layout, and each is the work of one replica of the model; a score is made by
    one of its ranks and added to zeros, so that the number of replicas changes nothing at all. ``report`` is
    told how many samples are done, by all replicas as far as this one knows.
    """
    device = get_accelerator().current_device_name()
    replica, replicas = layout.data_group.rank(), layout.data_group.size()
    sums = torch.zeros(len(samples), 2, dtype=torch.float64)
    for batch in range(-(-len(samples) // batch_size)):
        places = range(batch * batch_size, min((batch + 1) * batch_size, len(samples)))
        if batch % replicas == replica:
            padded = pad([samples[place] for place in places])
            logits = forward(padded.tokens.to(device))
            if logits is not None:
                own = score_batch(logits, padded, layout, vocab_size)
                if layout.tensor_group.rank() == 0:
                    sums[places.start : places.stop] = own.cpu()
        report(len(places))
    sums = sums.to(device)
    dist.all_reduce(sums)
    nll, wrong = sums.cpu().unbind(1)
    return Scores(nll.numpy(), wrong.numpy() == 0)


def pad(samples: Sequence[Sample]) -> Padded:
    """``samples`` as one batch."""
    inputs = max(len(sample.tokens) for sample in samples) - 1
    rows = np.zeros((len(samples), inputs + 1), dtype=np.int64)
    predicted = np.zeros((len(samples), inputs), dtype=bool)
    for row, flags, sample in zip(rows, predicted, samples, strict=True):
        length = len(sample.tokens)
        row[:length] = sample.tokens
        flags[length - 1 - sample.predicted : length - 1] = True
    tokens = torch.from_numpy(rows)
    return Padded(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.from_numpy(predicted))


def score_batch(logits: Tensor, batch: Padded, layout: ParallelLayout, vocab_size: int) -> Tensor:
    """logits [b, s, v/t] -> nats of each sample's predicted tokens, and how many are wrong: float64 [b, 2]."""
    predicted = batch.predicted.to(logits.device)
    counted = logits[predicted].float()  # [predicted tokens, v/t]
    labels = batch.labels.to(logits.device)[predicted]
    losses = vocab_parallel_cross_entropy(counted, labels, layout.tensor_group, vocab_size)
    wrong = vocab_parallel_argmax(counted, layout.tensor_group, vocab_size) != labels
    sample = predicted.nonzero()[:, 0]
    sums = torch.zeros(len(predicted), 2, dtype=torch.float64, device=logits.device)
    return sums.index_add_(0, sample, torch.stack([losses.double(), wrong.double()], 1))
