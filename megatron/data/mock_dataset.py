"""Mock data: samples computed from the seed and their index, for benchmarks without data files.

A document counts up from a random token: each token is the next id of the vocabulary, which a model can learn.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import SPECIAL_TOKENS, PairVocabulary, pair_sample
from megatron.data.splits import Samples, seed_words
from megatron.data.t5_dataset import FRAME, corrupted, span_problem
from megatron.tokenizer import Tokenizer, span_vocabulary, tokenizer_of

Draw = Callable[[np.random.RandomState], np.ndarray]
"""Draws a sample from the generator of its index."""


class MockDataset(Samples):
    """``samples`` samples of ``draw``, each of which depends only on ``seeds`` and its index."""

    def __init__(self, samples: int, seeds: Sequence[int], draw: Draw) -> None:
        super().__init__(samples)
        self._seed_words, self._draw = seeds, draw

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        generators = (np.random.RandomState([*self._seed_words, *seed_words(index)]) for index in indices)
        return np.stack([self._draw(random) for random in generators])


def mock_samples(data: DataConfig, name: str, samples: int, *, seed: int, masked_lm: bool) -> MockDataset:
    """``samples`` mock samples of the split ``name``. Raises DataError if the tokenizer's files are broken."""
    if data.decoder_seq_length:
        draw = _t5_samples(data)
    elif not masked_lm:
        draw = _gpt2_samples(data, tokenizer_of(data))
    else:
        assert isinstance(tokenizer := tokenizer_of(data), PairVocabulary), "a rule rejects other tokenizers"
        draw = _bert_samples(data, tokenizer)
    return MockDataset(samples, [*seed_words(seed), SPLITS.index(name)], draw)


def _gpt2_samples(data: DataConfig, tokenizer: Tokenizer) -> Draw:
    """Samples for GPT-2, int64 [seq_length + 1]: documents of random lengths, the last one cut off."""
    ordinary, length = np.delete(np.arange(tokenizer.vocab_size), tokenizer.eod), data.seq_length + 1

    def draw(random: np.random.RandomState) -> np.ndarray:
        sample = np.full(length, tokenizer.eod)
        begin = 0
        while begin < length:
            end = min(begin + random.randint(1, length), length)
            sample[begin:end] = _count(ordinary, end - begin, random)
            begin = end + 1  # the token in between stays the end-of-document token
        return sample

    return draw


def _bert_samples(data: DataConfig, tokenizer: PairVocabulary) -> Draw:
    """Samples for BERT in the format of ``BertDataset``, int64 [3, s]; the second span continues the first."""
    special = [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask]
    ordinary, longest = np.delete(np.arange(tokenizer.vocab_size), special), data.seq_length - SPECIAL_TOKENS

    def draw(random: np.random.RandomState) -> np.ndarray:
        is_short = random.random_sample() < data.short_seq_prob
        tokens = _count(ordinary, random.randint(2, longest + 1) if is_short else longest, random)
        a, b = np.split(tokens, [random.randint(1, len(tokens))])
        swapped = random.random_sample() < 0.5
        if swapped:
            a, b = b, a
        return pair_sample(a, b, swapped, tokenizer, data.seq_length, data.mask_prob, random)

    return draw


def _t5_samples(data: DataConfig) -> Draw:
    """Samples for T5 in the format of ``T5Dataset``. Raises DataError if the spans of a sample cannot fit."""
    if problem := span_problem(data):
        raise DataError(problem)
    vocabulary, longest = span_vocabulary(data), data.seq_length - FRAME
    ordinary = np.arange(vocabulary.text_tokens)
    return lambda random: corrupted(_count(ordinary, longest, random), longest, vocabulary, data, random)


def _count(ordinary: np.ndarray, length: int, random: np.random.RandomState) -> np.ndarray:
    """``length`` consecutive tokens of ``ordinary`` from a random one on."""
    return ordinary[(random.randint(len(ordinary)) + np.arange(length)) % len(ordinary)]
