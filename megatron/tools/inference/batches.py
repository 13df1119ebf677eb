"""Autoregressive decoding of batches: continuations of prompts (GPT, LLaVA), and T5's targets for encoded texts.

b batch, s sequence of the encoder, q new tokens of the decoder, h hidden, v vocabulary
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.engines.containers import run_in_order
from megatron.model.embedding import WordEmbedding, without_segment_ids
from megatron.tools.inference.images import ImagePrompt
from megatron.tools.inference.model import LanguageModel
from megatron.tools.inference.prompts import NEW_TOKENS, StoppingCriteria, checked_length


class DecodingBatch:
    """A batch of growing sequences and the logits of their next tokens, equal on every tensor-parallel rank.

    Keys and values are cached until a sequence is longer than ``context``; from then on, or always with
    ``use_cache=False``, each step recomputes the last ``context`` tokens.
    """

    def __init__(
        self, model: LanguageModel, sequences: Sequence[Sequence[int]], *, context: int, use_cache: bool = True
    ):
        self._model, self._context = model, context
        self._images = [encoded_images(model, sequence) for sequence in sequences]
        self.sequences = [list(sequence) for sequence in sequences]
        can_cache = self._longest() <= context and not is_reset_within(model.config, self.sequences)
        self._cache = model.empty_cache(len(sequences)) if use_cache and can_cache else None
        self.logits = self._next_logits(self.sequences, is_first=True)
        """Logits of the next tokens, fp32 on the CPU, [b, v]."""

    def append(self, tokens: Sequence[int]) -> None:
        """Append a token to each sequence."""
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)
        if self._longest() > self._context:
            self._cache = None
        self.logits = self._next_logits([[token] for token in tokens])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the sequences at these ``rows``, in this order; a row may be repeated."""
        self.sequences = [list(self.sequences[row]) for row in rows]
        self._images = [self._images[row] for row in rows]
        self.logits = self.logits[torch.tensor(rows)]
        if self._cache is not None:
            self._cache.select(rows)

    def can_join(self, other: "DecodingBatch") -> bool:
        """Whether ``other`` can join this batch: both must cache keys and values, up to the same context."""
        return self._cache is not None and other._cache is not None and self._context == other._context

    def join(self, other: "DecodingBatch") -> None:
        """Append the sequences of ``other``, which is no longer used afterwards."""
        assert self._cache is not None and other._cache is not None, "can_join"
        self._cache.join(other._cache)
        self.sequences += other.sequences
        self._images += other._images
        self.logits = torch.cat([self.logits, other.logits])

    def _longest(self) -> int:
        return max(map(len, self.sequences))

    @torch.inference_mode()
    def _next_logits(self, new: Sequence[Sequence[int]], *, is_first: bool = False) -> Tensor:
        """Logits [b, v] after the ``new`` tokens of each sequence."""
        if self._cache is None:
            new = [sequence[-self._context :] for sequence in self.sequences]
        counts, padded = [len(tokens) for tokens in new], self._padded(new)
        images = self._merged_images(padded) if is_first or self._cache is None else None
        return self._model.gathered(self._model.next_logits(padded, self._cache, counts, images))

    def _merged_images(self, tokens: Tensor) -> Tensor | None:
        """The image features for each placeholder in ``tokens`` [b, q], as [1, p, h]; None without images.

        Placeholders without an image, such as in a completion, get zeros.
        """
        images = [features for features in self._images if features is not None]
        if not images:
            return None
        placeholder = self._model.config.image_token_id
        rows = []
        for features, sequence, seen in zip(self._images, self.sequences, tokens, strict=True):
            before = sequence[: -self._context].count(placeholder)
            visible = images[0][:0] if features is None else features[before:]
            placeholders = int((seen == placeholder).sum())
            rows.append(F.pad(visible[:placeholders], (0, 0, 0, max(placeholders - len(visible), 0))))
        merged = torch.cat(rows).unsqueeze(0)
        return merged if merged.size(1) else None

    def _padded(self, sequences: Sequence[Sequence[int]], padding: int = 0) -> Tensor:
        """The sequences as a tensor [b, q], with ``padding`` after the shorter ones."""
        longest = max(map(len, sequences))
        rows = [[*sequence, *[padding] * (longest - len(sequence))] for sequence in sequences]
        return torch.tensor(rows, device=self._model.device)


@torch.inference_mode()
def encoded_images(model: LanguageModel, prompt: Sequence[int]) -> Tensor | None:
    """The projected features of the images of a prompt, [n p, h]; None without images."""
    images = prompt.images if isinstance(prompt, ImagePrompt) else None
    return None if images is None else model.projected(images)


def is_reset_within(config: ModelConfig, sequences: Sequence[Sequence[int]]) -> bool:
    """Whether a sequence has an end of document at which the model resets attention or positions: no cache then."""
    resets = config.reset_attention_mask or config.reset_position_ids
    return resets and any(config.eod_token in sequence for sequence in sequences)


class TextToTextBatch(DecodingBatch):
    """A batch of growing T5 targets, one for each encoded text, and the logits of their next tokens.

    ``sequences`` begin with the decoder's start token. Keys and values of self-attention and cross-attention are
    cached, unless ``use_cache`` is False.
    """

    def __init__(self, model: LanguageModel, texts: Sequence[Sequence[int]], *, use_cache: bool = True):
        self._model, config, layers = model, model.config, list[Any](model.module.forward_funcs)
        per_layer = 2 if config.has_relative_positions else 1  # modules of a transformer layer
        end = 2 + per_layer * config.encoder_num_layers + 1
        _, positions, *decoder = layers[end:-2]
        self._embedding, *self._encoder = layers[:end]
        self._positions = positions.args[0] if isinstance(positions, partial) else positions
        self._bias, self._decoder = decoder[0] if per_layer == 2 else None, decoder[per_layer - 1 :: per_layer]
        self._norm_and_head = layers[-2:]
        self._output, self._segment_ids = self._encoded(texts)
        targets = [[model.config.decoder_start_token]] * len(texts)
        super().__init__(model, targets, context=sys.maxsize, use_cache=use_cache)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the targets at these ``rows``, in this order; a row may be repeated."""
        super().select(rows)
        index = torch.tensor(rows, device=self._output.device)
        self._output, self._segment_ids = self._output[index], self._segment_ids[index]

    def can_join(self, other: DecodingBatch) -> bool:
        """Never: batches have encoded texts of different lengths."""
        return False

    @torch.inference_mode()
    def _encoded(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Output of the encoder [b, s, h], and segment ids [b, s], for texts with an end of document."""
        end = self._model.config.eod_token
        terminated = [[*text] if text and text[-1] == end else [*text, end] for text in texts]
        state = self._embedding.state_of_text(self._padded(terminated, padding=-1))
        output, segment_ids, *_ = run_in_order(self._encoder, state)
        return output, segment_ids

    @torch.inference_mode()
    def _next_logits(self, new: Sequence[Sequence[int]], *, is_first: bool = False) -> Tensor:
        """Logits [b, v] of the next token of each target."""
        if self._cache is None:
            return self._decode(self.sequences)
        self._cache.advance([len(tokens) for tokens in new])
        with self._model.decoding.using(self._cache):
            return self._decode(new)

    def _decode(self, new: Sequence[Sequence[int]]) -> Tensor:
        count, length = len(new[0]), len(self.sequences[0])
        hidden = without_segment_ids(WordEmbedding.forward(self._embedding, self._padded(new)))
        positions = torch.arange(length - count, length, device=self._model.device).unsqueeze(0)
        hidden = self._positions.embed(hidden, None, positions)
        bias = [] if self._bias is None else [self._bias.bias(count, length)]
        hidden, *_ = run_in_order(self._decoder, (hidden, self._output, self._segment_ids, *bias))
        return self._model.gathered(run_in_order(self._norm_and_head, hidden[:, -1:]).squeeze(1))


def new_tokens_after(model: LanguageModel, prompt: Sequence[int], limits: StoppingCriteria) -> int:
    """Maximum number of new tokens after ``prompt``. Raises ConfigError if it is empty or too long."""
    if model.continues:
        return checked_length(prompt, limits) - len(prompt)
    bounded = model.config.has_position_table
    checked_length(prompt, replace(limits, new_tokens=1, out_seq_length=None, slides=not bounded))
    maxima = [limits.new_tokens, limits.out_seq_length, limits.context if bounded else None]
    return min((maximum for maximum in maxima if maximum is not None), default=NEW_TOKENS)


def decoding_batch(
    model: LanguageModel, prompts: Sequence[Sequence[int]], *, context: int, use_cache: bool
) -> DecodingBatch:
    """A batch that continues the prompts, or with an encoder generates a target for each; see ``DecodingBatch``."""
    if not model.continues:
        return TextToTextBatch(model, prompts, use_cache=use_cache)
    return DecodingBatch(model, prompts, context=context, use_cache=use_cache)
