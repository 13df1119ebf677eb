"""How well a model predicts samples, shared out among the ranks.

b batch, s inputs of the longest sample of a batch, v padded vocabulary, t tensor-parallel size, k predicted tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.config import ActivationConfig, ModelConfig
from megatron.model.containers import PipelinedModel, run_in_order
from megatron.model.embedding import segment_ids_of
from megatron.model.gpt2 import GPT2Model, gpt2_layers, gpt2_loss
from megatron.model.transformer import HiddenStates, unpack
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.partition import balanced, partition_boundaries
from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy
from megatron.tools.evaluation.tasks import Sample, Scores
from megatron.tools.inference.model import DTYPES, fill
from megatron.tools.inference.source import Source, config_on


@dataclass(frozen=True)
class ForwardModel:
    """This rank's part of a model, in eval mode and on its device."""

    module: GPT2Model | PipelinedModel
    config: ModelConfig
    layout: ParallelLayout

    def logits(self, tokens: Tensor, predicted: Tensor) -> Tensor | None:
        """Logits [1, k, v/t] of what follows the tokens [b, s] where ``predicted`` [b, s] is true, and nowhere else.

        All ranks that share the model call it alike. None on those of stages before the last.
        """
        stream = tokens if self.layout.is_first_stage else self._received(tokens)
        if not self.layout.is_last_stage:
            self._send(unpack(run_in_order(self.module.forward_funcs, stream))[0])
            return None
        *layers, head = self.module.forward_funcs
        sequence_dim = self.config.sequence_dim
        hidden = run_in_order(layers, stream).movedim(sequence_dim, 1)[predicted].unsqueeze(0)  # [1, k, h]
        return head(hidden.movedim(1, sequence_dim))

    def _received(self, tokens: Tensor) -> HiddenStates:
        """What the stage before sends. Every stage has the tokens, so that their documents need not travel."""
        config, group = self.config, self.layout.pipe_group
        shape = tokens.shape if config.sequence_dim else tokens.t().shape
        dtype = torch.float32 if config.fp32_residual_connection else DTYPES[config.dtype]
        hidden = torch.empty(*shape, config.hidden_size, dtype=dtype, device=tokens.device)
        dist.recv(hidden, dist.get_global_rank(group, group.rank() - 1), group)
        return (hidden, segment_ids_of(tokens, config.eod_token)) if config.reset_attention_mask else hidden

    def _send(self, hidden: Tensor) -> None:
        group = self.layout.pipe_group
        dist.send(hidden.contiguous(), dist.get_global_rank(group, group.rank() + 1), group)


def open_forward(source: Source, layout: ParallelLayout, dtype: str, *, pipeline: bool) -> ForwardModel:
    """The model on ``layout``, computed in ``dtype``; in a pipeline its stages get equal shares of the layers.

    Raises ConfigError where the tensor group cannot share the model, CheckpointError where weights are not whole.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    if pipeline:
        layers = balanced([1] * config.num_layers, layout.pipe_group.size())
        parts = gpt2_layers(config, layout), gpt2_loss(config, layout)
        module = PipelinedModel(
            *parts, ActivationConfig(), layout, partition_boundaries=partition_boundaries(layers, config)
        )
    else:
        module = GPT2Model(config, ActivationConfig(), layout)
    return ForwardModel(fill(module, source, config, layout), config, layout)


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
    model: ForwardModel,
    samples: Sequence[Sample],
    *,
    batch_size: int,
    report: Callable[[int], object] = lambda done: None,
) -> Scores:
    """The scores of all samples, on every rank.

    Batches are the same whatever the layout, the longest samples first, and each is the work of one replica of the
    model. A score is made by one of its ranks and added to zeros, so that the number of replicas changes nothing at
    all. ``report`` is told how many samples are done, by all replicas as far as this one knows.
    """
    device = get_accelerator().current_device_name()
    replica, replicas = model.layout.data_group.rank(), model.layout.data_group.size()
    order = np.argsort([-len(sample.tokens) for sample in samples], kind="stable")
    sums = torch.zeros(len(samples), 2, dtype=torch.float64)
    for batch in range(-(-len(samples) // batch_size)):
        places = order[batch * batch_size : (batch + 1) * batch_size]
        if batch % replicas == replica:
            own = score_batch(model, Padded(*(part.to(device) for part in pad([samples[place] for place in places]))))
            if own is not None and model.layout.tensor_group.rank() == 0:
                sums[torch.from_numpy(places)] = own.cpu()
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


def score_batch(model: ForwardModel, batch: Padded) -> Tensor | None:
    """For each sample the nats of its predicted tokens, and how many are wrong: float64 [b, 2]; None as of logits."""
    logits = model.logits(batch.tokens, batch.predicted)
    if logits is None:
        return None
    labels = batch.labels[batch.predicted].unsqueeze(0)  # [1, k]
    group, vocab_size = model.layout.tensor_group, model.config.vocab_size
    losses = vocab_parallel_cross_entropy(logits, labels, group, vocab_size)
    wrong = vocab_parallel_argmax(logits, group, vocab_size) != labels
    sums = torch.zeros(batch.tokens.size(0), 2, dtype=torch.float64, device=labels.device)
    return sums.index_add_(0, batch.predicted.nonzero()[:, 0], torch.cat([losses.double(), wrong.double()]).t())
