"""Layers of T5, an encoder-decoder model (arXiv 1910.10683).

Encoder layers pass on (hidden [b, s, h], segment ids, int32 [b, s], tokens of the decoder, int32 [b, r]); decoder
layers (hidden [b, r, h], output of the encoder [b, s, h], segment ids). Within a pipeline stage, a fourth tensor is the
relative position bias of the stack, [1, n, q, k].

b batch, s encoder sequence, r decoder sequence, h hidden, n heads of this rank, q queries, k keys
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.attention import CrossAttention
from megatron.model.embedding import EmbeddingDropout, PositionEmbedding, WordEmbedding, without_segment_ids
from megatron.model.transformer import ParallelTransformerLayer
from megatron.model.weights import hidden_norm, weight
from megatron.ops.norm import choose_norm
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import sharded_parameter

State = tuple[Tensor, ...]
"""State passed between layers, see the top of the file."""


class EncoderParallelTransformerLayer(ParallelTransformerLayer):
    """An encoder layer, whose tokens attend to all tokens of the text but not to padding."""

    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden, segment_ids, tokens, *bias = state
        mask = _with_bias(bias, real_tokens(segment_ids))
        return self.compute(hidden, mask), segment_ids, tokens, *bias


class DecoderParallelTransformerLayer(ParallelTransformerLayer):
    """A decoder layer, with causal self-attention and cross-attention to the output of the encoder."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__(config, layout, layer_number=layer_number)
        self.inter_attention = CrossAttention(config, layout, layer_number=layer_number)
        self.post_inter_attention_layernorm = hidden_norm(config, layout)

    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden, encoder_output, segment_ids, *bias = state
        length = hidden.size(1)
        mask = _with_bias(bias, torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril())
        normed = self.input_layernorm(hidden)
        hidden = self.add(hidden, normed, self.attention(normed, mask))
        normed = self.post_attention_layernorm(hidden)
        context = self.inter_attention(normed, encoder_output, real_tokens(segment_ids))
        hidden = self.add(hidden, normed, context)
        normed = self.post_inter_attention_layernorm(hidden)
        return self.add(hidden, normed, self.mlp(normed)), encoder_output, segment_ids, *bias


def real_tokens(segment_ids: Tensor) -> Tensor:
    """Segment ids [b, s] -> mask [b, 1, 1, s] that is False for padding."""
    return segment_ids.eq(0)[:, None, None]


def _with_bias(bias: Sequence[Tensor], visible: Tensor) -> Tensor:
    """The mask ``visible``, or the relative position bias with -inf where ``visible`` is False."""
    return bias[0].masked_fill(~visible, -torch.inf) if bias else visible


class T5Embedding(WordEmbedding):
    """Word embedding shared by encoder, decoder and a tied head.

    Tokens of encoder and decoder, int64 [b, s + r], padded with -1 -> first state of the encoder; last state of the
    encoder -> first state of the decoder.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__(config, layout)
        self.decoder_seq_length = config.decoder_seq_length

    def forward(self, inputs: Any, to_logits: bool = False) -> Any:
        if to_logits:
            return super().forward(inputs, to_logits=True)
        if isinstance(inputs, tuple):
            encoder_output, segment_ids, tokens, *_ = inputs
            return super().forward(tokens), encoder_output, segment_ids
        text, tokens = inputs[:, : -self.decoder_seq_length], inputs[:, -self.decoder_seq_length :]
        return *self.state_of_text(text)[:2], tokens.int()

    def state_of_text(self, text: Tensor) -> State:
        """The first state of the encoder for a text [b, s], without decoder tokens."""
        return without_segment_ids(super().forward(text.clamp(min=0))), text.lt(0).int(), text[:, :0]


class _AppliedToHidden:
    """Mixin that applies a layer for hidden states to the first tensor of a state."""

    def forward(self, state: State) -> State:
        hidden, *others = state
        return (super().forward(hidden), *others)  # type: ignore[misc]


class StackDropout(_AppliedToHidden, EmbeddingDropout):  # type: ignore[misc]
    """Dropout after the word embedding of encoder or decoder."""


class StackPositions(_AppliedToHidden, PositionEmbedding):  # type: ignore[misc]
    """Position embedding and dropout after the word embedding of encoder or decoder."""


def encoder_norm(config: ModelConfig, layout: ParallelLayout) -> nn.Module:
    """The norm after the last encoder layer."""
    norm = choose_norm(config, fp32_residual=config.fp32_residual_connection)
    return type("EncoderNorm", (_AppliedToHidden, norm), {})(config.hidden_size, eps=config.layernorm_epsilon)


def without_encoder_output(state: State) -> Tensor:
    """Drop the encoder's output: layers after the last transformer layer take hidden [b, r, h] only."""
    return state[0]


class RelativePositions(nn.Module):
    """T5's relative positions: a bias of attention scores by token distance (arXiv 1910.10683, section 2.1).

    Adds the bias of each head, [1, n, s, s], to the state. All layers of encoder or decoder share one table. With
    ``causal`` the table covers only distances to earlier tokens.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, name: str, causal: bool):
        super().__init__()
        self.causal, self.max_distance = causal, config.relative_attention_max_distance
        shape = (config.relative_attention_num_buckets, config.num_attention_heads)
        table = weight(config, f"{name}_relative_positions").draw(shape)
        self.weight = sharded_parameter(table, dim=1, group=layout.tensor_group)

    def forward(self, state: State) -> State:
        if len(state) > 3:
            return state
        length = state[0].size(1)
        return (*state, self.bias(length, length))

    def bias(self, queries: int, keys: int) -> Tensor:
        """The bias [1, n, q, k], where the queries are the last q of the k tokens."""
        buckets = _buckets(queries, keys, self.causal, self.weight.size(0), self.max_distance, self.weight.device)
        return F.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)


def without_bias(state: State) -> State:
    """The state to send to the next stage, which computes the bias from its own copy of the table."""
    return state[:3]


def with_bias_apart(positions: Callable[[State], State], state: State) -> tuple[State, Tensor]:
    """A state without bias, and the bias of ``positions``, which recomputed layers use without it being an argument.

    Recomputation runs a separate backward pass for each layer. The gradients of the bias are accumulated in a separate
    tensor and passed on at the end, so that the table gets its gradient once, as ZeRO requires.
    """
    hidden, *others, bias = positions(state)
    accumulating = bias.detach().requires_grad_(bias.requires_grad)
    if bias.requires_grad and torch.is_grad_enabled():
        hidden = _PassBiasGradient.apply(hidden, bias, accumulating)
    return (hidden, *others), accumulating


class _PassBiasGradient(torch.autograd.Function):
    """Identity on ``hidden``; in the backward pass ``bias`` gets the gradient accumulated in ``accumulating``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor, accumulating: Tensor) -> Tensor:
        ctx.accumulating = accumulating
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.accumulating.grad, None


@lru_cache(maxsize=8)
def _buckets(queries: int, keys: int, causal: bool, buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """The bucket (table row) for each query and key, int64 [q, k].

    Unless attention is causal, half of the buckets are for keys after the query. In each direction, half of the buckets
    are for single distances, and the rest for ranges of logarithmically growing size.
    """
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance, offset = (-ahead).clamp(min=0), torch.zeros_like(ahead)
    if not causal:
        buckets //= 2
        distance, offset = ahead.abs(), (ahead > 0) * buckets
    exact = buckets // 2
    # fp32 and truncation as in Hugging Face's T5.
    growth = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).clamp(min=0).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
