"""Mock data: samples computed from the seed and their index, for benchmarks without data files.

A document counts up from a random token: each token is the next id of the vocabulary, which a model can learn.
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import SPECIAL_TOKENS, PairVocabulary, pair_sample
from megatron.data.splits import Samples, seed_words
from megatron.data.t5_dataset import FRAME, corrupted, span_problem
from megatron.tokenizer import Tokenizer, span_vocabulary, tokenizer_of


class MockDataset(Samples):
    """Base class: ``samples`` samples, each of which depends only on ``seeds`` and its index."""

    def __init__(self, samples: int, ordinary: np.ndarray, seq_length: int, seeds: Sequence[int]) -> None:
        super().__init__(samples)
        self._ordinary, self._seq_length, self._seed_words = ordinary, seq_length, seeds

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        generators = (np.random.RandomState([*self._seed_words, *seed_words(index)]) for index in indices)
        return np.stack([self._draw(random) for random in generators])

    @abstractmethod
    def _draw(self, random: np.random.RandomState) -> np.ndarray:
        """A sample, drawn from the generator of its index."""

    def _count(self, length: int, random: np.random.RandomState) -> np.ndarray:
        """``length`` consecutive ordinary tokens from a random one on."""
        first = random.randint(len(self._ordinary))
        return self._ordinary[(first + np.arange(length)) % len(self._ordinary)]


class MockGPT2Dataset(MockDataset):
    """Samples for GPT-2, int64 [seq_length + 1]: documents of random lengths, the last one cut off."""

    def __init__(self, samples: int, data: DataConfig, tokenizer: Tokenizer, seeds: Sequence[int]) -> None:
        ordinary = np.delete(np.arange(tokenizer.vocab_size), tokenizer.eod)
        super().__init__(samples, ordinary, data.seq_length, seeds)
        self._eod = tokenizer.eod

    def _draw(self, random: np.random.RandomState) -> np.ndarray:
        sample = np.full(self._seq_length + 1, self._eod)
        begin = 0
        while begin <= self._seq_length:
            end = min(begin + random.randint(1, self._seq_length + 1), self._seq_length + 1)
            sample[begin:end] = self._count(end - begin, random)
            begin = end + 1  # the token in between stays the end-of-document token
        return sample


class MockBertDataset(MockDataset):
    """Samples for BERT in the format of ``BertDataset``, int64 [3, s]; the second span continues the first."""

    def __init__(self, samples: int, data: DataConfig, tokenizer: PairVocabulary, seeds: Sequence[int]) -> None:
        special = [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask]
        super().__init__(samples, np.delete(np.arange(tokenizer.vocab_size), special), data.seq_length, seeds)
        self._tokenizer, self._mask_prob, self._short_seq_prob = tokenizer, data.mask_prob, data.short_seq_prob

    def _draw(self, random: np.random.RandomState) -> np.ndarray:
        longest = self._seq_length - SPECIAL_TOKENS
        is_short = random.random_sample() < self._short_seq_prob
        tokens = self._count(random.randint(2, longest + 1) if is_short else longest, random)
        a, b = np.split(tokens, [random.randint(1, len(tokens))])
        swapped = random.random_sample() < 0.5
        if swapped:
            a, b = b, a
        return pair_sample(a, b, swapped, self._tokenizer, self._seq_length, self._mask_prob, random)


class MockT5Dataset(MockDataset):
    """Samples for T5 in the format of ``T5Dataset``, of consecutive tokens with spans replaced."""

    def __init__(self, samples: int, data: DataConfig, seeds: Sequence[int]) -> None:
        """Raises DataError if the spans of a sample cannot fit."""
        if problem := span_problem(data):
            raise DataError(problem)
        self._data, self._vocabulary = data, span_vocabulary(data)
        super().__init__(samples, np.arange(self._vocabulary.text_tokens), data.seq_length, seeds)

    def _draw(self, random: np.random.RandomState) -> np.ndarray:
        longest = self._seq_length - FRAME
        return corrupted(self._count(longest, random), longest, self._vocabulary, self._data, random)


def mock_samples(data: DataConfig, name: str, samples: int, *, seed: int, masked_lm: bool) -> MockDataset:
    """``samples`` mock samples of the split ``name``. Raises DataError if the tokenizer's files are broken."""
    seeds = [*seed_words(seed), SPLITS.index(name)]
    if data.decoder_seq_length:
        return MockT5Dataset(samples, data, seeds)
    tokenizer = tokenizer_of(data)
    if not masked_lm:
        return MockGPT2Dataset(samples, data, tokenizer, seeds)
    assert isinstance(tokenizer, PairVocabulary), "a rule rejects other tokenizers"
    return MockBertDataset(samples, data, tokenizer, seeds)
