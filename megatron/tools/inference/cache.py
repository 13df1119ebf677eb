"""Incremental decoding: keys and values of earlier tokens, and the parts of a model that use them in generation.

``cached_decoding`` puts these parts in place of the attention cores and rotations that the model was built with. They
do the same as before while no cache is in use.

b batch, n heads with keys and values, q new tokens, c columns of the longest sequence, d size of a head
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
    """Keys and values of every layer, for a batch of sequences of several lengths, each of which begins in column 0.

    In each step ``advance`` reserves the columns after the tokens of each sequence, and each layer fills them with
    ``extend``. Sequences are added with ``join`` and removed with ``select``.
    """

    def __init__(self, config: ModelConfig, rows: int, *, heads: int, dtype: torch.dtype, device: torch.device):
        """For ``rows`` sequences without tokens."""
        # Zeros, since what is masked is multiplied by 0, and memory that was never written may hold NaN.
        self._storage = torch.zeros(config.num_layers, 2, rows, heads, 0, config.head_size, dtype=dtype, device=device)
        self._pre_tokens = config.pre_tokens
        self._lengths = [0] * rows
        self._end = 0
        self.positions = torch.empty(rows, 0, dtype=torch.long, device=device)
        """Positions of the new tokens in their sequences [b, q]."""
        self.rotation: tuple[Tensor, Tensor] | None = None
        """Cosines and sines of ``positions``, once a layer has computed them for all."""
        self.mask: Tensor | None = None
        """True where a new token attends to a column [b, 1, q, c]; None if each attends to all columns up to its own,
        which are all columns for a single token."""
        self.encoder_columns: dict[int, Tensor] = {}
        """T5's keys and values of the encoder's output [b, s, columns], by the id of their projection."""

    def advance(self, counts: Sequence[int]) -> None:
        """Reserve columns for as many new tokens of each sequence, all of them followed by padding up to the most.

        Padding is stored, too, after the tokens, which do not attend to it, and is replaced in the next step.
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
            back = self.positions.unsqueeze(-1) - torch.arange(self._end, device=device)  # [b, q, c]
            self.mask = ((back >= 0) & (back <= self._pre_tokens)).unsqueeze(1)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, n, q, d]. Returns those of all columns so far, [b, n, c, d] each."""
        keys, values = self._storage[layer, :, :, :, : self._end]
        index = self.positions[:, None, :, None].expand_as(key)
        keys.scatter_(2, index, key)
        values.scatter_(2, index, value)
        return keys, values

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order; one may be repeated."""
        index = torch.tensor(rows, device=self._storage.device)
        self._lengths = [self._lengths[row] for row in rows]
        self._storage = self._storage[:, :, index]
        self.encoder_columns = {name: columns[index] for name, columns in self.encoder_columns.items()}

    def join(self, other: "KeyValueCache") -> None:
        """Append the sequences of ``other``."""
        columns = max(self._storage.size(4), other._storage.size(4))
        self._reserve(columns)
        other._reserve(columns)
        self._storage = torch.cat([self._storage, other._storage], dim=2)
        self._lengths += other._lengths

    def _reserve(self, columns: int) -> None:
        """Make room for ``columns``, and for some more, so that not each token copies all of them."""
        missing = columns - self._storage.size(4)
        if missing > 0:
            self._storage = F.pad(self._storage, (0, 0, 0, max(missing, _MORE_COLUMNS)))


_MORE_COLUMNS = 128
"""Columns that are added at least when a cache is full."""


class CachedDecoding:
    """The cache that the attention of a model uses at present; none outside of ``using``."""

    def __init__(self) -> None:
        self.cache: KeyValueCache | None = None

    @contextmanager
    def using(self, cache: KeyValueCache) -> Iterator[None]:
        """Attention to the tokens in ``cache``, too, within the block."""
        self.cache = cache
        try:
            yield
        finally:
            self.cache = None


def cached_decoding(parts: Iterable[object]) -> CachedDecoding:
    """Let all attention of ``parts`` of a model use a cache, whenever there is one."""
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
    """An attention core whose new tokens attend to the cached ones, too."""

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
        return self.core(query, key, value, limits)  # of T5, whose layers know what a new token attends to


class CachedRotation(nn.Module):
    """Rotates new tokens by their positions in the cache."""

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
    """T5's projection of the encoder's output to keys and values, which stay the same from token to token."""

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
