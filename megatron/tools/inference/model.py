"""A loaded model for inference, on one process or sharded over a tensor-parallel group.

source = open_source(path)                             # without torch, see source.py: config and tokenizer
with opened_model(source, ranks, "bf16") as model:     # this rank's shard, in eval mode, on its device
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.config import ModelConfig, ParallelConfig
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.containers import SequentialModel, run_in_order
from megatron.launch.distributed import distributed
from megatron.model.embedding import OutputLayer, without_segment_ids
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax
from megatron.parallel.tensor.mappings import gather_from_model_parallel_region
from megatron.tools.inference.cached_layers import CachedLayer, cached_layer
from megatron.tools.inference.linear import InferenceLinear
from megatron.tools.inference.source import Source
from megatron.tools.inference.weights import load_model

NOT_FINITE = -1
"""Instead of the most likely token."""


@dataclass(frozen=True)
class LanguageModel:
    """A model in eval mode, with its configuration and tensor group."""

    module: SequentialModel
    config: ModelConfig
    tensor_group: ProcessGroup

    def last_hidden(
        self, tokens: Tensor, cache: KeyValueCache | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Hidden states [b, h], after the last norm, of the last of ``tokens`` [b, q], which follow those in ``cache``.

        Of each sequence only ``counts`` are tokens, by default all q, and the rest is padding.
        """
        parts: list[Any] = list(self.module.forward_funcs)  # of different signatures
        words, positions, *layers, _, last_norm, _ = parts
        b, q = tokens.shape
        counts = counts or [q] * b
        if cache is None:
            hidden = run_in_order([words, positions, *layers], tokens)
        else:
            cache.advance(counts)
            hidden = positions(without_segment_ids(words(tokens)), cache.positions)
            for layer in self._cached_layers:
                hidden = layer(hidden, cache)
        hidden = without_segment_ids(hidden).movedim(positions.sequence_dim, 1)  # [b, q, h]
        if min(counts) == q:
            last = hidden[:, -1]
        else:
            last = hidden[torch.arange(b, device=hidden.device), torch.tensor(counts, device=hidden.device) - 1]
        return last_norm(last)

    @cached_property
    def _cached_layers(self) -> list[CachedLayer]:
        return [cached_layer(part) for part in self.module.forward_funcs if isinstance(part, ParallelTransformerLayer)]

    @cached_property
    def head(self) -> InferenceLinear:
        """From hidden states [b, h] after the last norm to logits [b, v/t]."""
        parts: list[Any] = list(self.module.forward_funcs)
        return InferenceLinear(
            parts[-1].weight if isinstance(parts[-1], OutputLayer) else parts[0].word_embeddings.weight
        )

    @cached_property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.module.parameters()).device


@contextmanager
def opened_model(source: Source, ranks: int, dtype: str) -> Iterator[LanguageModel]:
    """The model on ``ranks`` tensor-parallel ranks, whose process group ends with the block.

    Needs a prepared environment. Raises as ``load_model``.
    """
    silence_known_warnings()
    with distributed(ParallelConfig(model_parallel_size=ranks, world_size=ranks)) as layout:
        with deepspeed_silenced(verbose=False):
            module = load_model(source, layout, dtype)
        yield LanguageModel(module, source.config, layout.tensor_group)


class DecodingBatch:
    """A batch of growing sequences, with the logits of the next token of each, equal on every tensor-parallel rank.

    Keys and values are cached until a sequence is longer than ``context``; then each token is recomputed from the last
    ``context`` ones. With ``use_cache=False`` it is so from the beginning.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: Sequence[Sequence[int]],
        *,
        context: int,
        new_tokens: int,
        use_cache: bool = True,
    ):
        """``new_tokens`` is the largest number of tokens that will be appended to a sequence."""
        self._model, self._context = model, context
        self.sequences = [list(sequence) for sequence in sequences]
        self._cache = self._empty_cache(new_tokens) if use_cache and self._can_cache() else None
        self._sharded = self._compute(self.sequences)
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Logits of the next tokens, fp32 on the CPU, [b, v]."""
        if self._logits is None:
            whole = gather_from_model_parallel_region(self._sharded, self._model.tensor_group)
            self._logits = whole[:, : self._model.config.vocab_size].float().cpu()
        return self._logits

    def most_likely(self) -> list[int]:
        """The most likely next token of each sequence; ranks that have no logits yet exchange no more than this.

        On one process NOT_FINITE if a sequence's logits are not.
        """
        vocab_size = self._model.config.vocab_size
        if self._logits is None and self._model.tensor_group.size() > 1:
            return vocab_parallel_argmax(self._sharded, self._model.tensor_group, vocab_size).tolist()
        if self._logits is None and self._sharded.device.type != "cpu":
            logits = self._sharded[:, :vocab_size]
            best, tokens = (found.tolist() for found in logits.max(-1))
        else:
            tokens = self.logits.numpy().argmax(-1).tolist()  # several times as fast as torch's
            best = [row[token] for row, token in zip(self.logits.numpy(), tokens, strict=True)]
        return [token if math.isfinite(value) else NOT_FINITE for token, value in zip(tokens, best, strict=True)]

    def append(self, tokens: Sequence[int]) -> None:
        """Append a token to each sequence."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)
        if self._longest() > self._context:
            self._cache = None
        self._sharded, self._logits = self._compute([[token] for token in tokens]), None

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these sequences, which may be fewer, and repeated."""
        self.sequences = [list(self.sequences[row]) for row in rows]
        self._sharded = self._sharded[torch.tensor(rows, device=self._sharded.device)]
        self._logits = None if self._logits is None else self._logits[torch.tensor(rows)]
        if self._cache is not None:
            self._cache.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        """Forget what is cached of these sequences, whose places others may take: what is not finite would spread."""
        if self._cache is not None:
            self._cache.clear(rows)

    def can_join(self, other: "DecodingBatch") -> bool:
        """Whether ``other`` can join: both cache keys and values, up to the same context."""
        return self._cache is not None and other._cache is not None and self._context == other._context

    def join(self, other: "DecodingBatch") -> None:
        """Append the sequences of ``other``, which ends as a batch of its own."""
        assert self._cache is not None and other._cache is not None, "can_join"
        self._cache.join(other._cache)
        self.sequences += other.sequences
        self._sharded, self._logits = torch.cat([self._sharded, other._sharded]), None

    def _longest(self) -> int:
        return max(map(len, self.sequences))

    def _can_cache(self) -> bool:
        """Whether all sequences fit the context, and none is reset within."""
        return self._longest() <= self._context and not is_reset_within(self._model.config, self.sequences)

    def _empty_cache(self, new_tokens: int) -> KeyValueCache:
        model = self._model
        return KeyValueCache(
            model.config,
            len(self.sequences),
            min(self._longest() + new_tokens, self._context),
            heads=max(model.config.query_groups // model.tensor_group.size(), 1),
            dtype=next(model.module.parameters()).dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def _compute(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Logits [b, v/t] after the ``new`` tokens of each sequence."""
        if self._cache is not None:
            counts = [len(tokens) for tokens in new]
            return self._model.head(self._model.last_hidden(self._padded(new), self._cache, counts))
        windows = [sequence[-self._context :] for sequence in self.sequences]
        logits: dict[int, Tensor] = {}
        in_order = sorted(range(len(windows)), key=lambda row: len(windows[row]))
        for _, group in groupby(in_order, key=lambda row: len(windows[row])):
            rows = list(group)
            tokens = self._padded([windows[row] for row in rows])
            logits |= zip(rows, self._model.head(self._model.last_hidden(tokens)), strict=True)
        return torch.stack([logits[row] for row in range(len(windows))])

    def _padded(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """[b, q] with zeros after the shorter ones."""
        longest = max(map(len, sequences))
        rows = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
        return torch.tensor(rows, device=self._model.device)


def is_reset_within(config: ModelConfig, sequences: Sequence[Sequence[int]]) -> bool:
    """Whether a document ends in a sequence at which the model resets attention or positions: it cannot be cached."""
    resets = config.reset_attention_mask or config.reset_position_ids
    return resets and any(config.eod_token in sequence for sequence in sequences)
