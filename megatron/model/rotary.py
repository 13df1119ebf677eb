"""Rotary position embedding: queries and keys are rotated by angles that grow with the position (arXiv 2104.09864).

b batch, n heads, s sequence, d size of a head, r rotated dimensions of a head
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.config.positions import HIGH_FREQUENCY_FACTOR, LOW_FREQUENCY_FACTOR, ORIGINAL_LENGTH
from megatron.ops.packed_attention import positions_in_segment
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_shard


class RotaryPositions(nn.Module):
    """Rotates query [b, n, s, d] and key [b, g, s, d] by the positions of their tokens, of which this rank has a shard.

    Positions count from the first token of the sequence, or of each segment in ``segment_ids`` [b, s of all ranks].
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.embedding, self.layout, self.resets = RotaryEmbedding.of(config), layout, config.reset_position_ids

    def forward(self, query: Tensor, key: Tensor, segment_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.resets and segment_ids is not None:
            tables = self.embedding.tables(positions_in_segment(segment_ids), query.dtype)
        else:
            s = query.size(2) * (self.layout.sequence_group.size() if self.layout.sequence_group else 1)
            tables = self.embedding.first_positions(s, query.dtype, query.device)
        cosines, sines = (sequence_shard(table, self.layout, 2) for table in tables)
        return rotate(query, (cosines, sines)), rotate(key, (cosines, sines))


@dataclass(frozen=True)
class RotaryEmbedding:
    """How a model rotates its queries and keys. Dimension i turns together with dimension i + r/2."""

    dimensions: int
    """Rotated dimensions of a head, r; those after them stay as they are."""
    base: float
    scaling_factor: float | None = None
    """Factor of Llama 3.1's longer wavelengths; None without it."""
    interpolation: float = 1.0
    """Factor by which all positions are divided."""
    yarn: "Yarn | None" = None

    @classmethod
    def of(cls, config: ModelConfig) -> "RotaryEmbedding":
        """The rotation of a model's queries and keys."""
        return cls(
            int(config.head_size * config.rotary_percent),
            config.rotary_base,
            config.rope_scaling_factor if config.use_rope_scaling else None,
            config.rotary_seq_len_interpolation_factor,
            Yarn.of(config) if config.position_embedding_type == "yarn" else None,
        )

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position of each pair of dimensions, fp32 [r/2]."""
        exponents = torch.arange(0, self.dimensions, 2, dtype=torch.float32, device=device) / self.dimensions
        frequencies = 1.0 / self.base**exponents
        if self.yarn is not None:
            return self.yarn.scaled(frequencies, self.base)
        if self.scaling_factor is not None:
            return _scaled(frequencies, self.scaling_factor)
        return frequencies / self.interpolation

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions [b, s]: [b, 1, s, r/2] each; YaRN's are longer than 1."""
        angles = positions.unsqueeze(1).unsqueeze(-1).float() * self.frequencies(positions.device)
        length = 1.0 if self.yarn is None else self.yarn.length
        return (angles.cos() * length).to(dtype), (angles.sin() * length).to(dtype)

    def first_positions(self, s: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tables of positions 0 to s - 1, [1, 1, s, r/2]; made once."""
        return _first_positions(self, s, dtype, device)


@lru_cache(maxsize=4)
def _first_positions(
    rotary: RotaryEmbedding, s: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    return rotary.tables(torch.arange(s, device=device).unsqueeze(0), dtype)


def _scaled(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's rule: long waves become ``factor`` times as long, short ones stay, and those between are mixed."""
    wavelengths = 2 * math.pi / frequencies
    weight = (ORIGINAL_LENGTH / wavelengths - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)
    weight = weight.clamp(0.0, 1.0)
    return (1 - weight) * frequencies / factor + weight * frequencies


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): short waves stay, long ones become ``factor`` times as long, with a ramp between."""

    factor: float
    original_length: int
    """Tokens of a sequence before the extension."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Turns within the original length at which the ramp begins and ends."""
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rounds: bool = True
    """Whether the ramp begins and ends at integral dimensions."""

    @classmethod
    def of(cls, config: ModelConfig) -> "Yarn":
        """That of a model whose positions are YaRN's."""
        assert config.yarn_rotary_scaling_factor is not None, "a rule requires it"
        return cls(
            config.yarn_rotary_scaling_factor,
            config.yarn_original_max_position_embeddings,
            config.yarn_beta_fast,
            config.yarn_beta_slow,
            config.yarn_mscale,
            config.yarn_mscale_all_dim,
            config.yarn_correction_range_round_to_int,
        )

    @property
    def length(self) -> float:
        """What rotated queries and keys are multiplied by, so that attention stays as sharp (section 3.4)."""
        of_scale, of_all = (0.1 * scale * math.log(self.factor) + 1 for scale in (self.mscale, self.mscale_all_dim))
        return of_scale / of_all

    def scaled(self, frequencies: Tensor, base: float) -> Tensor:
        """The frequencies [r/2] of rotation with ``base``, extended."""
        r = 2 * len(frequencies)
        begin, end = (
            r * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.rounds:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, r - 1)
        index = torch.arange(r // 2, dtype=torch.float32, device=frequencies.device)
        ramp = ((index - begin) / (end - begin or 0.001)).clamp(0, 1)
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [b, n, s, d] with its first r dimensions rotated by ``tables``, cosines and sines [b, 1, s, r/2]."""
    return _Rotate.apply(x, *tables)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so that nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(x, cosines, sines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(grad, cosines, -sines), None, None


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = cosines.size(-1)
    sizes = [half, half, x.size(-1) - 2 * half]
    first, second, rest = x.split(sizes, dim=-1)
    if torch.compiler.is_compiling():
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_first, to_second, to_rest = rotated.split(sizes, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines, value=-1)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines)
    to_rest.copy_(rest)
    return rotated
