"""Attention of the heads of one rank, with kernels chosen by device, precision and model options.

b batch, s sequence, n query heads, g key and value heads, q queries, k keys, d size of a head
"""

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.ops.choices import AttentionKernel, DeviceFacts, attention_kernel
from megatron.ops.packed_attention import attend_in_blocks, attend_varlen, attend_with_mask, window_mask


def chosen_kernel(config: ModelConfig, *, causal: bool, has_dropout: bool) -> AttentionKernel:
    """The attention kernel on the device of this process, for sequences longer than the model's window."""
    device = device_facts(torch.device(get_accelerator().current_device_name()))
    return attention_kernel(config, device, causal=causal, seq_length=config.pre_tokens + 2, has_dropout=has_dropout)


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """The properties of ``device`` that the choice of kernels depends on."""
    if device.type != "cuda" or torch.version.hip:
        return DeviceFacts("rocm" if torch.version.hip and device.type == "cuda" else device.type)
    capability = torch.get_device_module(device).get_device_capability(device)
    fused = torch.backends.cuda.is_flash_attention_available()
    return DeviceFacts("cuda", capability, fused, has_varlen=torch.__version__ >= "2.11")


class Attention:
    """Softmax attention of query [b, n, s, d] to key and value [b, g, s, d]: -> [b, n, s, d].

    With ``segment_ids`` [b, s] a token attends to its own segment only. ``causal`` attention is limited to earlier
    tokens, at most ``pre_tokens`` back; otherwise a token attends to its entire segment. The kernels, with and without
    dropout, are chosen when the object is made.
    """

    def __init__(self, config: ModelConfig, *, causal: bool, layer_number: int):
        self.causal, self.window = causal, config.pre_tokens if causal else None
        self.kernels = [chosen_kernel(config, causal=causal, has_dropout=has_dropout) for has_dropout in (False, True)]
        self._explicit: Callable[..., Tensor] | None = None
        if config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling:
            divisor = layer_number if config.apply_query_key_layer_scaling else 1
            self._explicit = partial(explicit_attention, divisor=divisor, in_fp32=config.attention_softmax_in_fp32)
        if config.compile:  # documents differ in each batch, so that it would recompile every time
            self._limited = torch.compiler.disable(self._limited)  # type: ignore[method-assign]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Attention limited to segments and windows."""
        if segment_ids is None and (self.window is None or self.window >= query.size(2) - 1):
            return self.dense(query, key, value, dropout=dropout)
        return self._limited(query, key, value, segment_ids, dropout)

    def dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Dense attention: query [b, n, q, d], key and value [b, g, k, d] -> [b, n, q, d].

        A boolean ``mask``, [q, k] or [b, 1, q, k], is True where a query attends to a key; others are added to the
        scores. Without a mask attention is causal if ``is_causal``, by default like the model.
        """
        is_causal = mask is None and (self.causal if is_causal is None else is_causal)
        if self._explicit is not None:
            return self._explicit(query, key, value, mask, is_causal=is_causal, dropout=dropout)
        is_grouped = query.size(1) != key.size(1)
        if is_grouped and not self.kernels[dropout > 0].shares_keys:
            (key, value), is_grouped = repeated_for_queries(query, key, value), False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=is_grouped
        )

    def _limited(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, dropout: float) -> Tensor:
        limits = self.kernels[dropout > 0].limits
        if limits == "varlen":
            return attend_varlen(query, key, value, segment_ids, self.window)
        attend = attend_with_mask if limits == "mask" else attend_in_blocks
        return attend(query, key, value, segment_ids, self.window, partial(self.dense, dropout=dropout))


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool,
    dropout: float = 0.0,
    divisor: int = 1,
    in_fp32: bool = False,
) -> Tensor:
    """Unfused attention, for options that no fused kernel supports: softmax in fp32, and query-key layer scaling.

    Scores are divided by ``divisor`` before they are rounded, and multiplied by it again in fp32.
    """
    key, value = repeated_for_queries(query, key, value)
    if in_fp32:  # an fp32 softmax of rounded scores would gain nothing
        query, key = query.float(), key.float()
    scores = (query / (math.sqrt(query.size(-1)) * divisor)) @ key.transpose(-1, -2)  # [b, n, q, k]
    if is_causal:
        mask = window_mask(scores.size(-1), scores.size(-1), scores.device)
    scores = scores.float() * divisor
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1).to(value.dtype), dropout) @ value


def repeated_for_queries(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads for grouped queries: [b, g, k, d] -> [b, n, k, d]."""
    repeats = query.size(1) // key.size(1)
    return (key, value) if repeats == 1 else (key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
