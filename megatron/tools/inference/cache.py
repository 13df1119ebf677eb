"""Incremental decoding: the key-value cache, and wrappers of a model's attention modules that use it.

``cached_decoding`` wraps the attention cores, rotations and cross-attention projections of a model. Without a cache in
use, the wrapped modules run unchanged.

b batch, n key-value heads, q new tokens, c columns of the cache (positions of its longest sequence), d size of a head
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.attention import CrossAttention, LocalCore, ParallelSelfAttention
from megatron.model.rotary import RotaryPositions, rotate, rotation_tables


class KeyValueCache:
    """Keys and values of every layer, for a batch of sequences of different lengths that all begin in column 0.

    In each step, ``advance`` reserves columns after the tokens of each sequence, and each layer fills them with
    ``extend``. Sequences are added with ``join`` and removed with ``select``.
    """

    def __init__(self, config: ModelConfig, rows: int, *, heads: int, dtype: torch.dtype, device: torch.device):
        """An empty cache for ``rows`` sequences."""
        # Zeros, since masked values are multiplied by 0, and uninitialized memory may hold NaN.
        self._storage = torch.zeros(config.num_layers, 2, rows, heads, 0, config.head_size, dtype=dtype, device=device)
        self._pre_tokens = config.pre_tokens
        self._lengths = [0] * rows
        self._end = 0
        self.positions = torch.empty(rows, 0, dtype=torch.long, device=device)
        """Positions of the new tokens in their sequences [b, q]."""
        self.rotation: tuple[Tensor, Tensor] | None = None
        """Cosines and sines of ``positions``; computed by the first layer, and used by all."""
        self.mask: Tensor | None = None
        """True where a new token attends to a column [b, 1, q, c]; None for plain causal attention, in which each
        token attends to all columns up to its own."""
        self.encoder_columns: dict[int, Tensor] = {}
        """T5's keys and values of the encoder's output [b, s, columns], by the id of the projection module."""

    def advance(self, counts: Sequence[int]) -> None:
        """Reserve columns for ``counts`` new tokens of each sequence, padded to the largest count.

        Padding is stored after the tokens; no token attends to it, and the next step overwrites it.
        """
        q, begins, device = max(counts), self._lengths, self._storage.device
        self._lengths = [begin + count for begin, count in zip(begins, counts, strict=True)]
        self._end = max(begins) + q
        self._reserve(self._end)
        self.positions = torch.tensor(begins, device=device).unsqueeze(1) + torch.arange(q, device=device)  # [b, q]
        self.rotation = None
        is_even = q == 1 and min(begins) == max(begins)
        if self._pre_tokens >= self._end - 1 and (is_even or not any(begins)):
            self.mask = None
        else:
            distance = self.positions.unsqueeze(-1) - torch.arange(self._end, device=device)  # [b, q, c]
            self.mask = ((distance >= 0) & (distance <= self._pre_tokens)).unsqueeze(1)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, n, q, d]. Returns the keys and values of all columns, [b, n, c, d] each."""
        keys, values = self._storage[layer, :, :, :, : self._end]
        index = self.positions[:, None, :, None].expand_as(key)
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys, values

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the sequences at these ``rows``, in this order; a row may be repeated."""
        index = torch.tensor(rows, device=self._storage.device)
        self._lengths = [self._lengths[row] for row in rows]
        self._storage = self._storage[:, :, index]
        self.encoder_columns = {name: columns[index] for name, columns in self.encoder_columns.items()}

    def join(self, other: "KeyValueCache") -> None:
        """Append the sequences of ``other``."""
        columns = max(self._storage.size(4), other._storage.size(4))
        padded = [F.pad(cache._storage, (0, 0, 0, columns - cache._storage.size(4))) for cache in (self, other)]
        self._storage = torch.cat(padded, dim=2)
        self._lengths += other._lengths

    def _reserve(self, columns: int) -> None:
        """Make room for ``columns``, in steps of ``_MORE_COLUMNS``, so that not every token copies the storage."""
        missing = columns - self._storage.size(4)
        if missing > 0:
            self._storage = F.pad(self._storage, (0, 0, 0, max(missing, _MORE_COLUMNS)))


_MORE_COLUMNS = 128
"""Minimum number of columns added when the cache is full."""


class CachedDecoding:
    """Holds the cache that a model's attention currently uses; None outside of ``using``."""

    def __init__(self) -> None:
        self.cache: KeyValueCache | None = None

    @contextmanager
    def using(self, cache: KeyValueCache) -> Iterator[None]:
        """Let attention use ``cache`` within the ``with`` block."""
        self.cache = cache
        try:
            yield
        finally:
            self.cache = None


def cached_decoding(parts: Iterable[object]) -> CachedDecoding:
    """Wrap all attention modules in ``parts`` of a model, so that they use the cache of the returned object."""
    decoding, layers = CachedDecoding(), 0
    for module in [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]:
        if isinstance(module, ParallelSelfAttention):
            module.core = CachedCore(module.core, decoding, layers)
            layers += 1
            if isinstance(module.rotary, RotaryPositions):
                module.rotary = CachedRotation(module.rotary, decoding)
        elif isinstance(module, CrossAttention):
            module.key_value = CachedProjection(module.key_value, decoding)
    return decoding


class CachedCore(nn.Module):
    """An attention core in which new tokens also attend to the cached ones."""

    def __init__(self, core: nn.Module, decoding: CachedDecoding, layer: int):
        super().__init__()
        self.core, self.decoding, self.layer = core, decoding, layer

    def forward(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None = None) -> Tensor:
        cache = self.decoding.cache
        if cache is None:
            return self.core(query, key, value, limits)
        key, value = cache.extend(self.layer, key, value)
        if isinstance(self.core, LocalCore):
            return self.core.attention.dense(query, key, value, cache.mask, is_causal=query.size(2) > 1)
        return self.core(query, key, value, limits)  # T5: its layers mask by themselves


class CachedRotation(nn.Module):
    """Rotary embedding that takes the positions of new tokens from the cache."""

    def __init__(self, rotary: RotaryPositions, decoding: CachedDecoding):
        super().__init__()
        self.rotary, self.decoding = rotary, decoding

    def forward(self, query: Tensor, key: Tensor, segment_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        cache = self.decoding.cache
        if cache is None:
            return self.rotary(query, key, segment_ids)
        cache.rotation = cache.rotation or rotation_tables(self.rotary.config, cache.positions, query.dtype)
        return rotate(query, cache.rotation), rotate(key, cache.rotation)


class CachedProjection(nn.Module):
    """T5's projection of the encoder's output to keys and values, computed once for all tokens."""

    def __init__(self, projection: nn.Module, decoding: CachedDecoding):
        super().__init__()
        self.projection, self.decoding = projection, decoding

    def forward(self, encoder_output: Tensor) -> Tensor:
        if self.decoding.cache is None:
            return self.projection(encoder_output)
        columns = self.decoding.cache.encoder_columns
        if id(self) not in columns:
            columns[id(self)] = self.projection(encoder_output)
        return columns[id(self)]
