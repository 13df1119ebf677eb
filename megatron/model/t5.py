"""The layers of T5: an encoder, and a decoder that reads its output (arXiv 1910.10683).

Between layers of the encoder travel (hidden [b, s, h], segment ids, int32 [b, s], tokens of the decoder, int32 [b, r]);
between layers of the decoder (hidden [b, r, h], output of the encoder [b, s, h], segment ids). Within a stage the bias
of the stack, [1, n, q, k], is a last one.

b batch, s sequence of the encoder, r of the decoder, h hidden, n heads of this rank, q queries, k keys
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
from megatron.model.embedding import (
    EmbeddingDropout,
    PositionEmbedding,
    WordEmbedding,
    without_segment_ids,
)
from megatron.model.transformer import ParallelTransformerLayer
from megatron.model.weights import hidden_norm, weight
from megatron.ops.norm import choose_norm
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import sharded_parameter

State = tuple[Tensor, ...]
"""What layers pass on, see the top of the file."""


class EncoderParallelTransformerLayer(ParallelTransformerLayer):
    """A layer of the encoder, whose tokens attend to the entire text, but not to padding."""

    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden, segment_ids, tokens, *bias = state
        mask = _with_bias(bias, real_tokens(segment_ids))
        return self.compute(hidden, mask), segment_ids, tokens, *bias


class DecoderParallelTransformerLayer(ParallelTransformerLayer):
    """A layer of the decoder, whose tokens attend to earlier ones, and to the output of the encoder."""

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
    """Segment ids [b, s] -> mask [b, 1, 1, s] that is True where there is no padding."""
    return segment_ids.eq(0)[:, None, None]


def _with_bias(bias: Sequence[Tensor], visible: Tensor) -> Tensor:
    """The mask ``visible``, or the bias of relative positions where it is True, and -inf elsewhere."""
    return bias[0].masked_fill(~visible, -torch.inf) if bias else visible


class T5Embedding(WordEmbedding):
    """The table of tokens, of which encoder, decoder and a tied head make use.

    Tokens of both, int64 [b, s + r], -1 where the encoder's text ends -> the state of the encoder; the encoder's last
    state -> the decoder's first.
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
        """The state of the encoder for a text [b, s] without tokens of a decoder."""
        return without_segment_ids(super().forward(text.clamp(min=0))), text.lt(0).int(), text[:, :0]


class _OfHidden:
    """Makes a layer of hidden states one of the first tensor of a state."""

    def forward(self, state: State) -> State:
        hidden, *others = state
        return (super().forward(hidden), *others)  # type: ignore[misc]


class StackDropout(_OfHidden, EmbeddingDropout):  # type: ignore[misc]
    """Dropout of the embedded tokens of a stack."""


class StackPositions(_OfHidden, PositionEmbedding):  # type: ignore[misc]
    """Adds learned positions to the embedded tokens of a stack, then applies dropout."""


def encoder_norm(config: ModelConfig, layout: ParallelLayout) -> nn.Module:
    """The norm after the last layer of the encoder."""
    norm = choose_norm(config, fp32_residual=config.fp32_residual_connection)
    return type("EncoderNorm", (_OfHidden, norm), {})(config.hidden_size, eps=config.layernorm_epsilon)


def without_encoder_output(state: State) -> Tensor:
    """Only hidden [b, r, h]: nothing after the last transformer layer reads the encoder's output."""
    return state[0]


class RelativePositions(nn.Module):
    """T5's positions: a bias of the scores by the distance of two tokens (arXiv 1910.10683, section 2.1).

    It adds the bias of each head, [1, n, s, s], to what layers pass on. One table is for all layers of a stack. With
    ``causal`` distances are to earlier tokens only.
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
        """[1, n, q, k] for queries that are the last ones of the keys."""
        buckets = _buckets(queries, keys, self.causal, self.weight.size(0), self.max_distance, self.weight.device)
        return F.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)


def without_bias(state: State) -> State:
    """What a stage sends on: the next stage has its own table."""
    return state[:3]


def with_bias_apart(positions: Callable[[State], State], state: State) -> tuple[State, Tensor]:
    """A state, and the bias of ``positions`` for layers that are recomputed, which is no argument of theirs.

    The backward pass of a layer ends before the backward pass of the previous one begins. Their gradients of the bias
    are added up in a separate tensor, and handed over at the end: the table gets its gradient once, as ZeRO needs it.
    """
    hidden, *others, bias = positions(state)
    collecting = bias.detach().requires_grad_(bias.requires_grad)
    if bias.requires_grad and torch.is_grad_enabled():
        hidden = _HandOver.apply(hidden, bias, collecting)
    return (hidden, *others), collecting


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor, collecting: Tensor) -> Tensor:
        ctx.collecting = collecting
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.collecting.grad, None


@lru_cache(maxsize=8)
def _buckets(queries: int, keys: int, causal: bool, buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """The row of the table for each query and key, int64 [q, k].

    Half of the rows are for keys after the query, unless attention is causal. Of the rows of a direction half are for
    one distance each, and the others for ranges that grow with the logarithm of the distance.
    """
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance, offset = (-ahead).clamp(min=0), torch.zeros_like(ahead)
    if not causal:
        buckets //= 2
        distance, offset = ahead.abs(), (ahead > 0) * buckets
    exact = buckets // 2
    # As in transformers' T5: in fp32, and truncated.
    growth = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).clamp(min=0).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
