"""Scores samples on all ranks: log-likelihoods of their tokens.

b batch, s inputs of the longest sample of a batch, v padded vocabulary, t tensor-parallel size, k predicted tokens
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.common.errors import ConfigError
from megatron.config import ActivationConfig, ModelConfig
from megatron.engines.containers import (
    SequentialModel,
    build_layers,
    run_in_order,
    sequential_model,
)
from megatron.engines.pipelined_model import PipelinedModel
from megatron.model.partition import balanced, partition_boundaries
from megatron.model.spec import architecture_of
from megatron.model.transformer import HiddenStates, unpack
from megatron.ops.packed_attention import segment_ids_of
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy
from megatron.tokenizer import Tokenizer
from megatron.tools.evaluation.tasks import Sample, Scores
from megatron.tools.inference.generator import TextGenerator
from megatron.tools.inference.model import DTYPES, LanguageModel, load_weights
from megatron.tools.inference.source import Source, config_on

Report = Callable[[int], object]
"""Called with the number of samples that have been finished."""


class UnsupportedTask(ConfigError):
    """A task is not supported by this model. Raised on every rank."""

    on_every_rank = True


@dataclass(frozen=True)
class ForwardModel:
    """This rank's shard of a model, in eval mode and on its device."""

    module: SequentialModel | PipelinedModel
    config: ModelConfig
    layout: ParallelLayout

    def logits(
        self, tokens: Tensor, predicted: Tensor, texts: Tensor | None = None, images: Tensor | None = None
    ) -> Tensor | None:
        """Logits [1, k, v/t] of the next tokens at the positions of tokens [b, s] where ``predicted`` [b, s] is true.

        Encoder inputs are ``texts`` [b, s of the encoder], padded with -1, or ``images``, uint8 [i, size, size, 3].
        All ranks of a replica of the model must call it. Returns None on stages before the last.
        """
        if texts is not None:
            parts: list[Any] = list(self.module.forward_funcs)  # their signatures differ
            embedding, *others, last = parts
            state = (*embedding.state_of_text(texts)[:2], tokens.int())
            logits: Tensor = last(run_in_order(others, state)[predicted].unsqueeze(0))
            return logits
        hidden_states: Any = (tokens if images is None else (images, tokens)) if self.layout.is_first_stage else None
        hidden_states = self._receive(tokens) if hidden_states is None else hidden_states
        if not self.layout.is_last_stage:
            self._send(unpack(run_in_order(self.module.forward_funcs, hidden_states))[0])
            return None
        *layers, head = self.module.forward_funcs
        sequence_dim = self.config.sequence_dim
        hidden = (
            unpack(run_in_order(layers, hidden_states))[0].movedim(sequence_dim, 1)[predicted].unsqueeze(0)
        )  # [1, k, h]
        return unpack(head(hidden.movedim(1, sequence_dim)))[0]

    def generator(self, tokenizer: Tokenizer) -> TextGenerator:
        """A text generator of this model. Raises ConfigError on every rank for a model with pipeline stages."""
        if not isinstance(self.module, SequentialModel):
            raise UnsupportedTask("a task generates text, which pipeline stages cannot: leave --pipe-parallel-size out")
        return TextGenerator(LanguageModel(self.module, self.config, self.layout.tensor_group), tokenizer)

    def texts(
        self, batches: Sequence[Sequence[int]], generate: Callable[[Sequence[int]], Iterable[str]], report: Report
    ) -> list[str]:
        """Call ``generate`` for each batch of request numbers, which start at 0; replicas of the model share the work.

        Returns the texts of all requests, on every rank.
        """
        group = self.layout.data_group
        here: dict[int, str] = {}
        for number, batch in enumerate(batches):
            if number % group.size() == group.rank():
                here |= zip(batch, generate(batch), strict=True)
            report(len(batch))
        gathered: list[dict[int, str]] = [{} for _ in range(group.size())]
        dist.all_gather_object(gathered, here, group=group)
        texts = {number: text for part in gathered for number, text in part.items()}
        return [texts[number] for number in range(len(texts))]

    def _receive(self, tokens: Tensor) -> HiddenStates:
        """Receive hidden states from the previous stage. Segment ids are not sent, since every stage has the tokens."""
        config, group = self.config, self.layout.pipe_group
        shape = tokens.shape if config.sequence_dim else tokens.t().shape
        dtype = torch.float32 if config.fp32_residual_connection else DTYPES[config.dtype]
        hidden = torch.empty(*shape, config.hidden_size, dtype=dtype, device=tokens.device)
        dist.recv(hidden, dist.get_global_rank(group, group.rank() - 1), group)
        return (hidden, segment_ids_of(tokens, config.eod_token)) if config.layers_need_segment_ids else hidden

    def _send(self, hidden: Tensor) -> None:
        group = self.layout.pipe_group
        dist.send(hidden.contiguous(), dist.get_global_rank(group, group.rank() + 1), group)


def open_forward(source: Source, layout: ParallelLayout, dtype: str, *, pipeline: bool) -> ForwardModel:
    """Load the model on ``layout`` in ``dtype``; pipeline stages get equal numbers of layers.

    Raises ConfigError if the tensor-parallel size does not divide the model, CheckpointError if weights are missing.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    module: SequentialModel | PipelinedModel
    if pipeline:
        layers = balanced([1] * config.num_layers, layout.pipe_group.size())
        spec, boundaries = architecture_of(config), partition_boundaries(layers, config)
        parts = build_layers(spec.layers(config), config, layout), spec.build_loss(config, layout)
        schedule = Schedule("1f1b", layout.pipe_group.size(), micro_batches=1)
        module = PipelinedModel(*parts, ActivationConfig(), layout, partition_boundaries=boundaries, schedule=schedule)
    else:
        module = sequential_model(config, ActivationConfig(), layout)
    return ForwardModel(load_weights(module, source, config, layout), config, layout)


class Padded(NamedTuple):
    """A batch of samples with padding at the end, which causal attention ignores."""

    tokens: Tensor
    """int64 [b, s]"""
    labels: Tensor
    """int64 [b, s]"""
    predicted: Tensor
    """Mask of the labels that are scored: bool [b, s]"""
    texts: Tensor | None = None
    """Encoder inputs: int64 [b, s of the longest text], -1 for padding"""
    images: Tensor | None = None
    """Images of all samples in order, uint8 [i, size, size, 3]; a black one if the samples have none"""


@torch.no_grad()
def score(
    model: ForwardModel,
    samples: Sequence[Sample],
    *,
    batch_size: int,
    report: Report = lambda samples: None,
) -> Scores:
    """Score all samples. Returns the scores on every rank.

    Batches do not depend on the layout and start with the longest samples; each is computed by one replica of the
    model. Exactly one rank adds a score to zeros, so that scores do not depend on the number of replicas. ``report`` is
    called with the size of each batch.
    """
    device = get_accelerator().current_device_name()
    replica, replicas = model.layout.data_group.rank(), model.layout.data_group.size()
    order = np.argsort([-len(sample.tokens) for sample in samples], kind="stable")
    sums = torch.zeros(len(samples), 2, dtype=torch.float64)
    for batch in range(-(-len(samples) // batch_size)):
        chosen = order[batch * batch_size : (batch + 1) * batch_size]
        if batch % replicas == replica:
            scored = score_batch(model, pad([samples[index] for index in chosen], device))
            if scored is not None and model.layout.tensor_group.rank() == 0:
                sums[torch.from_numpy(chosen)] = scored.cpu()
        report(len(chosen))
    sums = sums.to(device)
    dist.all_reduce(sums)
    nll, wrong = sums.cpu().unbind(1)
    return Scores(nll.numpy(), wrong.numpy() == 0)


def pad(samples: Sequence[Sample], device: str) -> Padded:
    """``samples`` as one batch on ``device``."""
    inputs = max(len(sample.tokens) for sample in samples) - 1
    rows = np.zeros((len(samples), inputs + 1), dtype=np.int64)
    predicted = np.zeros((len(samples), inputs), dtype=bool)
    for row, flags, sample in zip(rows, predicted, samples, strict=True):
        length = len(sample.tokens)
        row[:length] = sample.tokens
        flags[length - 1 - sample.predicted : length - 1] = True
    longest = max(len(sample.text) for sample in samples)
    texts = [[*sample.text, *[-1] * (longest - len(sample.text))] for sample in samples]
    tokens = torch.from_numpy(rows).to(device)
    return Padded(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        torch.from_numpy(predicted).to(device),
        torch.tensor(texts, device=device) if longest else None,
        _images_of([sample.images for sample in samples if sample.images is not None], device),
    )


def _images_of(samples: Sequence[np.ndarray], device: str) -> Tensor | None:
    """The images of all samples, at least one; None for a model without images."""
    if not samples:
        return None
    images = np.concatenate(samples)
    return torch.from_numpy(images if len(images) else np.zeros((1, *images.shape[1:]), np.uint8)).to(device)


def score_batch(model: ForwardModel, batch: Padded) -> Tensor | None:
    """For each sample the loss of its predicted tokens, in nats, and the number of wrong predictions: float64 [b, 2].

    Returns None on stages before the last.
    """
    logits = model.logits(batch.tokens, batch.predicted, batch.texts, batch.images)
    if logits is None:
        return None
    labels = batch.labels[batch.predicted].unsqueeze(0)  # [1, k]
    group, vocab_size = model.layout.tensor_group, model.config.vocab_size
    losses = vocab_parallel_cross_entropy(logits, labels, group, vocab_size)
    wrong = vocab_parallel_argmax(logits, group, vocab_size) != labels
    sums = torch.zeros(batch.tokens.size(0), 2, dtype=torch.float64, device=labels.device)
    return sums.index_add_(0, batch.predicted.nonzero()[:, 0], torch.cat([losses.double(), wrong.double()]).t())
