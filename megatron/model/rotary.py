"""Rotary position embedding (RoPE, arXiv 2104.09864), with the scaling of Llama 3.1, linear interpolation and YaRN.

b batch, n heads, s sequence, d size of a head, r rotated dimensions of a head
"""

import math
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
    """Applies RoPE to query [b, n, s, d] and key [b, g, s, d] of this rank's shard of the sequence.

    Positions count from the first token of the sequence, or of each segment in ``segment_ids`` [b, s of all ranks].
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.config, self.layout = config, layout

    def forward(self, query: Tensor, key: Tensor, segment_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.config.reset_position_ids and segment_ids is not None:
            tables = rotation_tables(self.config, positions_in_segment(segment_ids), query.dtype)
        else:
            s = query.size(2) * (self.layout.sequence_group.size() if self.layout.sequence_group else 1)
            tables = _first_positions(self.config, s, query.dtype, query.device)
        cosines, sines = (sequence_shard(table, self.layout, 2) for table in tables)
        return rotate(query, (cosines, sines)), rotate(key, (cosines, sines))


def rotation_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions [b, s]: [b, 1, s, r/2] each. YaRN scales them by its attention factor (3.4)."""
    angles = positions.unsqueeze(1).unsqueeze(-1).float() * frequencies(config, positions.device)
    scale = 1.0
    if config.yarn_rotary_scaling_factor is not None:
        growth = 0.1 * math.log(config.yarn_rotary_scaling_factor)
        scale = (growth * config.yarn_mscale + 1) / (growth * config.yarn_mscale_all_dim + 1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


@lru_cache(maxsize=4)
def _first_positions(config: ModelConfig, s: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cached tables for positions 0 to s - 1, [1, 1, s, r/2]."""
    return rotation_tables(config, torch.arange(s, device=device).unsqueeze(0), dtype)


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions (i, i + r/2), fp32 [r/2]."""
    r = int(config.head_size * config.rotary_percent)
    plain = 1.0 / config.rotary_base ** (torch.arange(0, r, 2, dtype=torch.float32, device=device) / r)
    if config.yarn_rotary_scaling_factor is not None:
        ramp = _yarn_ramp(config, r).to(device)
        return plain * (1 - ramp) + plain / config.yarn_rotary_scaling_factor * ramp
    if config.use_rope_scaling:  # Llama 3.1: scale long wavelengths, keep short ones, interpolate between them
        turns = ORIGINAL_LENGTH * plain / (2 * math.pi)
        weight = (turns - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)
        weight = weight.clamp(0.0, 1.0)
        return (1 - weight) * plain / config.rope_scaling_factor + weight * plain
    return plain / config.rotary_seq_len_interpolation_factor


def _yarn_ramp(config: ModelConfig, r: int) -> Tensor:
    """YaRN's (arXiv 2309.00071) interpolation weight per frequency [r/2]: 0 for short wavelengths, 1 for long ones."""
    length = config.yarn_original_max_position_embeddings
    begin, end = (
        r * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))
        for turns in (config.yarn_beta_fast, config.yarn_beta_slow)
    )
    if config.yarn_correction_range_round_to_int:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, r - 1)
    return ((torch.arange(r // 2, dtype=torch.float32) - begin) / (end - begin or 0.001)).clamp(0, 1)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first r dimensions of x [b, n, s, d] by ``tables``, cosines and sines [b, 1, s, r/2]."""
    return _Rotate.apply(x, *tables)


class _Rotate(torch.autograd.Function):
    """Rotation whose backward pass rotates the gradient back, so that x is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(x, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(grad, cosines, sines, -1), None, None


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor, direction: int) -> Tensor:
    """``x`` rotated by the angles for ``direction`` 1, or rotated back for -1."""
    half = cosines.size(-1)
    sizes = [half, half, x.size(-1) - 2 * half]
    first, second, rest = x.split(sizes, dim=-1)
    if torch.compiler.is_compiling():
        sines = sines * direction
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    to_first, to_second, to_rest = rotated.split(sizes, dim=-1)
    torch.mul(first, cosines, out=to_first).addcmul_(second, sines, value=-direction)
    torch.mul(second, cosines, out=to_second).addcmul_(first, sines, value=direction)
    if rest.size(-1):
        to_rest.copy_(rest)
    return rotated
