"""Embeddings and output projections: tokens to hidden states, and hidden states to logits.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size. Hidden states are written
[b, s, h], and are [s, b, h] if ``sequence_dim`` is 0; the first dimension of tokens and logits is always the batch.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.architectures import architecture_of
from megatron.model.transformer import HiddenStates, unpack
from megatron.model.weights import weight
from megatron.ops.linear import linear_kernel
from megatron.ops.packed_attention import copy_on_host, on_both, positions_in_segment, segment_ids_of
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_groups, sequence_parallel_dim, sequence_shard
from megatron.parallel.tensor.layers import VocabParallelEmbedding, all_reduce_gradient
from megatron.parallel.tensor.random import random_stream


class WordEmbedding(nn.Module):
    """tokens [b, s] -> hidden [b, s, h], with segment ids if attention or positions are reset per document.

    Input [b, 2, s] has tokens and their segment ids; without them, segments end at end-of-document tokens.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.eod_token = config.eod_token
        self.layout = layout
        self.sequence_dim = config.sequence_dim
        self.fp32_residual = config.fp32_residual_connection
        self.returns_segment_ids = config.reset_attention_mask or config.reset_position_ids
        self.word_embeddings = VocabParallelEmbedding(**_vocabulary(config, layout, "word_embeddings"))

    def forward(self, hidden_states: Tensor, to_logits: bool = False) -> HiddenStates:
        if to_logits:
            return self.word_embeddings.logits(hidden_states).movedim(self.sequence_dim, 1)
        tokens = hidden_states if hidden_states.dim() == 2 else hidden_states[:, 0]
        tokens = sequence_shard(tokens, self.layout, 1)
        hidden = self.word_embeddings(tokens.movedim(1, self.sequence_dim))
        hidden = hidden.float() if self.fp32_residual else hidden
        if self.training and torch.is_grad_enabled() and not hidden.requires_grad:
            # With a frozen embedding, recomputed layers would otherwise get no gradients. They get a view, since
            # partitioned checkpointing replaces the data of its input.
            hidden = hidden.requires_grad_().view_as(hidden)
        return (hidden, segment_ids_of(hidden_states, self.eod_token)) if self.returns_segment_ids else hidden


class PairEmbedding(WordEmbedding):
    """tokens and token types [b, 2, s] -> hidden [b, s, h], and token types, int32 [b, s]."""

    def forward(self, hidden_states: Tensor, to_logits: bool = False) -> HiddenStates:
        if to_logits:
            return super().forward(hidden_states, to_logits=True)
        return without_segment_ids(super().forward(hidden_states[:, 0])), on_both(token_types, hidden_states)


def to_logits(embedding: WordEmbedding, hidden: Tensor) -> Tensor:
    """hidden [b, s, h] -> logits [b, s, v/t].

    Calls the module instead of a method: ZeRO-3 gathers its weight only then.
    """
    return embedding(hidden, to_logits=True)


class OutputLayer(VocabParallelEmbedding):
    """The output projection of a model that does not share its word embedding: hidden -> logits [b, s, v/t]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__(**_vocabulary(config, layout, "output_layer"))
        self.dim_of_sequence = config.sequence_dim

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).movedim(self.dim_of_sequence, 1)


def _vocabulary(config: ModelConfig, layout: ParallelLayout, name: str) -> dict[str, Any]:
    """The arguments of ``VocabParallelEmbedding`` for the table ``name``."""
    return {
        "num_embeddings": config.vocab_size,
        "embedding_dim": config.hidden_size,
        "padded_size": config.padded_vocab_size,
        "group": layout.tensor_group,
        "init": weight(config, name),
        "sequence_dim": sequence_parallel_dim(config, layout),
        "kernel": linear_kernel(config),
    }


class EmbeddingDropout(nn.Module):
    """Dropout after the word embedding, for a model without a position table: hidden [b, s, h] -> hidden."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, passes_segment_ids: bool):
        super().__init__()
        self.per_rank_rng = layout.sequence_parallel
        self.dropout = config.hidden_dropout
        self.sequence_dim = config.sequence_dim
        self.passes_segment_ids = passes_segment_ids

    def forward(self, hidden_states: HiddenStates, positions: Tensor | None = None) -> HiddenStates:
        """``positions`` [b, s] are given in generation, where tokens do not start at position 0."""
        hidden, segment_ids = unpack(hidden_states)
        hidden = self.embed(hidden, segment_ids, positions)
        if self.training and self.dropout:
            with random_stream(per_rank=self.per_rank_rng):
                hidden = F.dropout(hidden, self.dropout)
        return (hidden, segment_ids) if self.passes_segment_ids and segment_ids is not None else hidden

    def embed(self, hidden: Tensor, segment_ids: Tensor | None, positions: Tensor | None) -> Tensor:
        """Hook for subclasses that add embeddings to ``hidden``; here it is returned unchanged."""
        return hidden


class PositionEmbedding(EmbeddingDropout):
    """Adds the position embedding, then applies dropout: hidden [b, s, h] -> hidden [b, s, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, passes_segment_ids: bool):
        super().__init__(config, layout, passes_segment_ids=passes_segment_ids)
        self.layout = layout
        self.resets = config.reset_position_ids
        self.position_embeddings = _replicated_table(
            config, layout, "position_embeddings", config.max_position_embeddings
        )

    def embed(self, hidden: Tensor, segment_ids: Tensor | None, positions: Tensor | None) -> Tensor:
        """``hidden`` plus the embeddings of its positions."""
        if positions is None:
            positions = self._positions(hidden, segment_ids)
        positions = positions.movedim(1, self.sequence_dim)
        positions = sequence_shard(positions, self.layout, self.sequence_dim, of_tensor_group=True)
        return hidden + self.position_embeddings(positions)

    def _positions(self, hidden: Tensor, segment_ids: Tensor | None) -> Tensor:
        """Positions counted from the first token, [1, s], or from the first token of each segment, [b, s]."""
        if self.resets:
            assert segment_ids is not None
            return positions_in_segment(segment_ids)
        parts = math.prod(group.size() for group in sequence_groups(self.layout))
        return torch.arange(hidden.size(self.sequence_dim) * parts, device=hidden.device).unsqueeze(0)


class TokenTypeEmbedding(nn.Module):
    """Adds BERT's token-type embedding: hidden, token types -> hidden, segment ids.

    Token types [b, s] are 0 and 1 for the two sentences, and -1 for padding, which becomes a separate segment and gets
    the embedding of the first sentence.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.layout = layout
        self.sequence_dim = config.sequence_dim
        self.tokentype_embeddings = _replicated_table(config, layout, "tokentype_embeddings", 2)

    def forward(self, hidden_states: tuple[Tensor, Tensor]) -> HiddenStates:
        hidden, token_types = hidden_states
        types = token_types.clamp(min=0).movedim(1, self.sequence_dim)
        types = sequence_shard(types, self.layout, self.sequence_dim, of_tensor_group=True)
        return hidden + self.tokentype_embeddings(types), on_both(are_padding, token_types)


def token_types(pairs: Tensor) -> Tensor:
    """The token types, int32 [b, s], of tokens and token types [b, 2, s]."""
    return pairs[:, 1].int()


def are_padding(types: Tensor) -> Tensor:
    """The segment ids, int32 [b, s], of token types: 1 for padding."""
    return types.lt(0).int()


def limits_on_host(config: ModelConfig, tokens: Tensor) -> Tensor | None:
    """The segment ids of ``tokens`` that limit attention, int32 [b, s] in host memory; None if nothing is limited."""
    host = copy_on_host(tokens) if has_segments(config) else None
    if host is None:
        return None
    is_causal = architecture_of(config).is_causal
    return segment_ids_of(host, config.eod_token) if is_causal else are_padding(token_types(host))


def has_segments(config: ModelConfig) -> bool:
    """Whether attention is limited to segment ids, which layers pass on: documents, or in BERT what is not padding."""
    return config.reset_attention_mask or not architecture_of(config).is_causal


def _replicated_table(config: ModelConfig, layout: ParallelLayout, name: str, rows: int) -> nn.Embedding:
    table = nn.Embedding.from_pretrained(weight(config, name).draw((rows, config.hidden_size)), freeze=False)
    if layout.sequence_parallel:
        all_reduce_gradient(table.weight, layout.tensor_group)
    return table


def without_segment_ids(hidden_states: HiddenStates) -> Tensor:
    """Drop segment ids: layers after the last transformer layer take hidden [b, s, h] only."""
    return unpack(hidden_states)[0]
