"""Both ends of a model: tokens to hidden states, and hidden states to logits with the same table.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size. Hidden states are written
[b, s, h], and are [s, b, h] where ``sequence_dim`` is 0; tokens and logits begin with the batch always.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.initial_weights import weight
from megatron.model.sequence import cut_dim, cutting_groups, own_part
from megatron.model.transformer import Stream, unpack
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import VocabParallelEmbedding, sum_gradient
from megatron.parallel.tensor.random import random_stream


class WordEmbedding(nn.Module):
    """tokens [b, s] -> hidden [b, s, h], with each token's document number where the model asks for it."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.eod_token = config.eod_token
        self.sequence_group = layout.sequence_group
        self.sequence_dim = config.sequence_dim
        self.stream_is_fp32 = config.fp32_residual_connection
        self.counts_documents = config.reset_attention_mask or config.reset_position_ids
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            padded_size=config.padded_vocab_size,
            group=layout.tensor_group,
            init=weight(config, "word_embeddings"),
            sequence_dim=cut_dim(config, layout),
        )

    def forward(self, stream: Tensor, to_logits: bool = False) -> Stream:
        if to_logits:
            return self.word_embeddings.logits(stream).movedim(self.sequence_dim, 1)
        tokens = own_part(stream, self.sequence_group, 1)
        hidden = self.word_embeddings(tokens.movedim(1, self.sequence_dim))
        hidden = hidden.float() if self.stream_is_fp32 else hidden
        return (hidden, document_numbers(stream, self.eod_token)) if self.counts_documents else hidden


class PairEmbedding(WordEmbedding):
    """tokens and segments [b, 2, s] -> hidden [b, s, h], and segments as they travel, int32 [b, s]."""

    def forward(self, stream: Tensor, to_logits: bool = False) -> Stream:
        if to_logits:
            return super().forward(stream, to_logits=True)
        tokens, segments = stream.unbind(1)
        return super().forward(tokens), segments.int()


def to_logits(embedding: WordEmbedding, hidden: Tensor) -> Tensor:
    """hidden [b, s, h] -> logits [b, s, v/t].

    Through the module's own call: only there does ZeRO-3 bring the weight together.
    """
    return embedding(hidden, to_logits=True)


class PositionEmbedding(nn.Module):
    """Adds what is learned about each position, then drops out: hidden [b, s, h] -> hidden [b, s, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, passes_documents: bool):
        super().__init__()
        self.cutting_groups = cutting_groups(layout)
        self.draws_its_own = layout.sequence_parallel
        self.dropout = config.hidden_dropout
        self.sequence_dim = config.sequence_dim
        self.resets = config.reset_position_ids
        self.passes_documents = passes_documents
        table = weight(config, "position_embeddings").draw((config.max_position_embeddings, config.hidden_size))
        self.position_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        if layout.sequence_parallel:
            sum_gradient(self.position_embeddings.weight, layout.tensor_group)

    def forward(self, stream: Stream, positions: Tensor | None = None) -> Stream:
        """``positions`` [b, s] where the tokens are not the first ones, or not all of a batch begin at once."""
        hidden, documents = unpack(stream)
        if positions is None:
            positions = self._positions(hidden, documents)
        positions = positions.movedim(1, self.sequence_dim)
        for group in self.cutting_groups:
            positions = own_part(positions, group, self.sequence_dim)
        hidden = hidden + self.position_embeddings(positions)
        if self.training and self.dropout:
            with random_stream(own=self.draws_its_own):
                hidden = F.dropout(hidden, self.dropout)
        return (hidden, documents) if self.passes_documents else hidden

    def _positions(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        """Counted from the first token, or from the first of each document: [1, s] or [b, s]."""
        if self.resets:
            return positions_in_document(documents)
        parts = math.prod(group.size() for group in self.cutting_groups if group)
        return torch.arange(hidden.size(self.sequence_dim) * parts, device=hidden.device).unsqueeze(0)


class TokenTypeEmbedding(nn.Module):
    """Adds what is learned about the first and the second sentence: hidden, segments -> hidden, documents.

    Segments [b, s] are 0 and 1 for the sentences, and -1 for padding, which counts as the first one and as a
    document of its own.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.cutting_groups = cutting_groups(layout)
        self.sequence_dim = config.sequence_dim
        table = weight(config, "tokentype_embeddings").draw((2, config.hidden_size))
        self.tokentype_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        if layout.sequence_parallel:
            sum_gradient(self.tokentype_embeddings.weight, layout.tensor_group)

    def forward(self, stream: tuple[Tensor, Tensor]) -> Stream:
        hidden, segments = stream
        types = segments.clamp(min=0).movedim(1, self.sequence_dim)
        for group in self.cutting_groups:
            types = own_part(types, group, self.sequence_dim)
        return hidden + self.tokentype_embeddings(types), segments.lt(0).int()


def without_documents(stream: Stream) -> Tensor:
    """hidden [b, s, h] alone: behind the last transformer layer nobody asks for documents."""
    return unpack(stream)[0]


def document_numbers(tokens: Tensor, eod_token: int) -> Tensor:
    """tokens [b, s] -> ends of document before each token, int32 [b, s]. An end belongs to what it ends."""
    ends = (tokens == eod_token).int()
    return ends.cumsum(-1, dtype=torch.int32) - ends


def positions_in_document(documents: Tensor) -> Tensor:
    """documents [b, s] -> distance from the first token of the document [b, s]."""
    index = torch.arange(documents.size(-1), device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - index.masked_fill(~begins, 0).cummax(-1).values
