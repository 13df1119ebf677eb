"""A loaded model for inference, on one process or sharded over a tensor-parallel group.

source = open_source(path)                             # without torch, see source.py: config and tokenizer
with opened_model(source, ranks, "bf16") as model:     # this rank's shard, in eval mode, on its device

b batch, q new tokens, h hidden, v vocabulary, t tensor-parallel size
"""

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
from megatron.model.embedding import without_segment_ids
from megatron.parallel.tensor.mappings import gather_from_model_parallel_region
from megatron.tools.inference.cache import CachedDecoding, KeyValueCache, cached_decoding
from megatron.tools.inference.source import Source
from megatron.tools.inference.weights import load_model

NOT_FINITE = -1
"""In place of the next token where logits are not finite."""


@dataclass(frozen=True)
class LanguageModel:
    """A model in eval mode, with its configuration and tensor group."""

    module: SequentialModel
    config: ModelConfig
    tensor_group: ProcessGroup

    def next_logits(
        self, tokens: Tensor, cache: KeyValueCache | None = None, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Logits [b, v/t] of what follows the last of ``tokens`` [b, q], which follow those in ``cache``.

        Of each sequence only ``counts`` are tokens, by default all q, and the rest is padding.
        """
        parts: list[Any] = list(self.module.forward_funcs)  # with different signatures
        words, positions, *layers, last_norm, head = parts
        b, q = tokens.shape
        counts = counts or [q] * b
        if cache is None:
            hidden = run_in_order([words, positions, *layers], tokens)
        else:
            cache.advance(counts)
            embedded = positions(without_segment_ids(words(tokens)), cache.positions)
            with self.decoding.using(cache):
                hidden = run_in_order(layers, embedded)
        rows, ends = torch.arange(b, device=hidden.device), torch.tensor(counts, device=hidden.device) - 1
        last = last_norm(hidden.movedim(self.config.sequence_dim, 1)[rows, ends])  # [b, h]
        return head(last.unsqueeze(self.config.sequence_dim)).squeeze(1)

    @cached_property
    def decoding(self) -> CachedDecoding:
        """The cache in use by its attention."""
        return cached_decoding(self.module)

    def empty_cache(self, rows: int) -> KeyValueCache:
        """A cache for ``rows`` sequences."""
        heads = max(self.config.query_groups // self.tensor_group.size(), 1)
        dtype = next(self.module.parameters()).dtype
        return KeyValueCache(self.config, rows, heads=heads, dtype=dtype, device=self.device)

    def gathered(self, logits: Tensor) -> Tensor:
        """logits [b, v/t] of this rank -> the logits of all ranks, without padding, in fp32 on the CPU [b, v]."""
        logits = gather_from_model_parallel_region(logits, self.tensor_group)
        return logits[:, : self.config.vocab_size].float().cpu()

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
        self, model: LanguageModel, sequences: Sequence[Sequence[int]], *, context: int, use_cache: bool = True
    ):
        self._model, self._context = model, context
        self.sequences = [list(sequence) for sequence in sequences]
        can_cache = self._longest() <= context and not is_reset_within(model.config, self.sequences)
        self._cache = model.empty_cache(len(sequences)) if use_cache and can_cache else None
        self.logits = self._next_logits(self.sequences)
        """Of the next tokens, fp32 on the CPU, [b, v]."""

    def append(self, tokens: Sequence[int]) -> None:
        """Append a token to each sequence."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)
        if self._longest() > self._context:
            self._cache = None
        self.logits = self._next_logits([[token] for token in tokens])

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these sequences, which may be fewer, and repeated."""
        self.sequences = [list(self.sequences[row]) for row in rows]
        self.logits = self.logits[torch.tensor(rows)]
        if self._cache is not None:
            self._cache.select(rows)

    def can_join(self, other: "DecodingBatch") -> bool:
        """Whether ``other`` can join: both cache keys and values, up to the same context."""
        return self._cache is not None and other._cache is not None and self._context == other._context

    def join(self, other: "DecodingBatch") -> None:
        """Append the sequences of ``other``, which is no longer used afterwards."""
        assert self._cache is not None and other._cache is not None, "can_join"
        self._cache.join(other._cache)
        self.sequences += other.sequences
        self.logits = torch.cat([self.logits, other.logits])

    def _longest(self) -> int:
        return max(map(len, self.sequences))

    @torch.inference_mode()
    def _next_logits(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Logits [b, v] after the ``new`` tokens of each sequence."""
        if self._cache is not None:
            counts = [len(tokens) for tokens in new]
            return self._model.gathered(self._model.next_logits(self._padded(new), self._cache, counts))
        windows = [sequence[-self._context :] for sequence in self.sequences]
        logits: dict[int, Tensor] = {}
        in_order = sorted(range(len(windows)), key=lambda row: len(windows[row]))
        for _, group in groupby(in_order, key=lambda row: len(windows[row])):
            rows = list(group)
            tokens = self._padded([windows[row] for row in rows])
            logits |= zip(rows, self._model.gathered(self._model.next_logits(tokens)), strict=True)
        return torch.stack([logits[row] for row in range(len(windows))])

    def _padded(self, sequences: Sequence[Sequence[int]], padding: int = 0) -> Tensor:
        """[b, q] with ``padding`` after the shorter ones."""
        longest = max(map(len, sequences))
        rows = [[*sequence, *[padding] * (longest - len(sequence))] for sequence in sequences]
        return torch.tensor(rows, device=self._model.device)


def is_reset_within(config: ModelConfig, sequences: Sequence[Sequence[int]]) -> bool:
    """Whether a document ends in a sequence at which the model resets attention or positions: it cannot be cached."""
    resets = config.reset_attention_mask or config.reset_position_ids
    return resets and any(config.eod_token in sequence for sequence in sequences)
