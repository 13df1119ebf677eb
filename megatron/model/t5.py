"""The layers of T5: an encoder, and a decoder that reads its output (arXiv 1910.10683).

Between layers of the encoder travel (hidden [b, s, h], segment ids, int32 [b, s], tokens of the decoder, int32 [b, r]);
between layers of the decoder (hidden [b, r, h], output of the encoder [b, s, h], segment ids). Within a stage the bias
of the stack, [1, n, q, k], is a last one.

b batch, s sequence of the encoder, r of the decoder, h hidden, n heads of this rank, d size of a head
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention import CrossAttention
from megatron.model.embedding import (
    EmbeddingDropout,
    PositionEmbedding,
    WordEmbedding,
    without_segment_ids,
)
from megatron.model.relative_positions import RelativePositions
from megatron.model.transformer import ParallelTransformerLayer
from megatron.model.weights import norm_class
from megatron.parallel.layout import ParallelLayout

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
        norm = norm_class(config, layout)
        self.post_inter_attention_layernorm = norm(config.hidden_size, eps=config.layernorm_epsilon)

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
    norm = norm_class(config, layout)
    return type("EncoderNorm", (_OfHidden, norm), {})(config.hidden_size, eps=config.layernorm_epsilon)


def without_encoder_output(state: State) -> Tensor:
    """Only hidden [b, r, h]: nothing after the last transformer layer reads the encoder's output."""
    return state[0]


class Parts(NamedTuple):
    """The built layers of a model, as generation calls them."""

    front: Sequence[Any]
    """From the embedding to the norm of the encoder."""
    positions: EmbeddingDropout
    """What is added to embedded tokens of the decoder."""
    bias: RelativePositions | None
    decoder: Sequence[Any]
    back: Sequence[Any]
    """The last norm, and the head."""


def parts_of(layers: Sequence[Any], config: ModelConfig) -> Parts:
    """The parts of a model's built layers."""
    each = 2 if config.has_relative_positions else 1
    after = 2 + each * config.encoder_num_layers + 1
    _, *rest = layers[after:]
    positions, decoder = rest[0], rest[1 : 1 + each * config.decoder_num_layers]
    return Parts(
        layers[:after],
        positions.args[0] if isinstance(positions, partial) else positions,
        decoder[0] if each == 2 else None,
        decoder[each - 1 :: each],
        layers[-2:],
    )
