"""Decoding with T5: texts are encoded once, and their targets grow token by token.

b batch, s sequence of the encoder, q new tokens of the decoder, h hidden, v padded vocabulary, t tensor-parallel size
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.engines.containers import run_in_order
from megatron.model.embedding import WordEmbedding
from megatron.model.t5 import (
    DecoderParallelTransformerLayer,
    State,
    T5Embedding,
    parts_of,
)
from megatron.model.t5_attention import DecoderCache
from megatron.tools.inference.model import DecodingBatch, LanguageModel
from megatron.tools.inference.prompts import NEW_TOKENS, StoppingCriteria, checked_length


class TextToTextBatch(DecodingBatch):
    """A batch of targets that grow, one for each text, with the logits of the next token of each.

    ``sequences`` begin with the token that the decoder reads first. Keys and values of both attentions are cached,
    unless ``use_cache`` is False.
    """

    def __init__(self, model: LanguageModel, texts: Sequence[Sequence[int]], *, use_cache: bool = True):
        self._model = model
        self._layers = parts_of(model.module.forward_funcs, model.config)
        embedding = self._layers.front[0]
        assert isinstance(embedding, T5Embedding)
        self._embedding = embedding
        self.sequences = [[model.config.decoder_start_token] for _ in texts]
        self._kept, self._cache = DecoderCache() if use_cache else None, None
        self._output, self._segment_ids = self._encode([self._ended(text) for text in texts])
        self._sharded, self._logits = self._next(), None

    def append(self, tokens: Sequence[int]) -> None:
        """Append a token to each target."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)
        self._sharded, self._logits = self._next(), None

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these targets, which may be fewer, and repeated."""
        self.sequences = [list(self.sequences[row]) for row in rows]
        index = torch.tensor(rows, device=self._output.device)
        self._sharded, self._logits = self._sharded[index], None
        self._output, self._segment_ids = self._output[index], self._segment_ids[index]
        if self._kept is not None:
            self._kept.select(index)

    def can_join(self, other: DecodingBatch) -> bool:
        """Whether ``other`` can join: each batch has texts of its own length."""
        return False

    def _ended(self, text: Sequence[int]) -> list[int]:
        """``text`` with the token that ends it, as in fine-tuning."""
        end = self._model.config.eod_token
        return [*text] if text and text[-1] == end else [*text, end]

    @torch.inference_mode()
    def _encode(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Output of the encoder [b, s, h], and segment ids [b, s]."""
        longest = max(map(len, texts))
        rows = [[*text, *[-1] * (longest - len(text))] for text in texts]
        state = self._embedding.state_of_text(torch.tensor(rows, device=self._model.device))
        output, segment_ids, *_ = run_in_order(self._layers.front[1:], state)
        return output, segment_ids

    @torch.inference_mode()
    def _next(self) -> Tensor:
        """Logits [b, v/t] of the next token of each target."""
        new = 1 if self._kept is not None else len(self.sequences[0])
        tokens = torch.tensor([sequence[-new:] for sequence in self.sequences], device=self._model.device)
        hidden = WordEmbedding.forward(self._embedding, tokens)
        assert isinstance(hidden, Tensor)
        before = len(self.sequences[0]) - new
        places = torch.arange(before, before + new, device=hidden.device).unsqueeze(0)
        state: State = (self._layers.positions.embed(hidden, None, places), self._output, self._segment_ids)
        if self._layers.bias is not None:
            state = (*state, self._layers.bias.bias(new, before + new))
        for layer in self._layers.decoder:
            assert isinstance(layer, DecoderParallelTransformerLayer)
            state = layer(state, self._kept)
        return run_in_order(self._layers.back, state[0][:, -1:]).squeeze(1)


def continues(model: LanguageModel) -> bool:
    """Whether completions continue the prompts; those of a model with an encoder are texts of their own."""
    return not model.config.encoder_num_layers


def new_tokens_after(model: LanguageModel, prompt: Sequence[int], limits: StoppingCriteria) -> int:
    """How many tokens may follow ``prompt``. Raises ConfigError if it is empty or too long."""
    if continues(model):
        return checked_length(prompt, limits) - len(prompt)
    bounded = model.config.has_position_table
    checked_length(prompt, replace(limits, new_tokens=1, out_seq_length=None, slides=not bounded))
    longest = [limits.new_tokens, limits.out_seq_length, limits.context if bounded else None]
    return min((most for most in longest if most is not None), default=NEW_TOKENS)


def decoding_batch(
    model: LanguageModel, prompts: Sequence[Sequence[int]], *, context: int, new_tokens: int, use_cache: bool
) -> DecodingBatch:
    """What continues the prompts, or writes a target for each if the model has an encoder; see ``DecodingBatch``."""
    if not continues(model):
        return TextToTextBatch(model, prompts, use_cache=use_cache)
    return DecodingBatch(model, prompts, context=context, new_tokens=new_tokens, use_cache=use_cache)
