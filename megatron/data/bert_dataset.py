"""Samples for BERT: two spans of sentences, in their original order or swapped, with some words masked.

    [CLS] first span [SEP] second span [SEP] [PAD] ...

Both spans are parts of the same run of sentences: see ``megatron.data.sentence_dataset``.

s sequence
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.sentence_dataset import Run, SentenceDataset, random_runs, words_of
from megatron.data.splits import Source, seed_words
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.words import NullTokenizer, WordPieceTokenizer

PairVocabulary = WordPieceTokenizer | NullTokenizer
"""Tokenizers with the tokens that frame, pad and mask a pair of sentences."""
SPECIAL_TOKENS = 3
"""Tokens of a sample besides the sentences: [CLS], and a [SEP] after each span."""
RUN_LENGTHS, RUN_SHARES = (1, 2, 3), (6 / 11, 3 / 11, 2 / 11)
"""Words that are masked together, and their probabilities, as in Megatron-LM."""


class BertDataset(SentenceDataset):
    """Samples for BERT: pairs of spans with masked words.

    A sample depends only on the seed and its index. Each epoch forms other pairs and masks other words.
    """

    fewest = 2
    lacks = "document of two sentences: make the data set with tools/preprocess_data.py --split-sentences, or"

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        """Raises DataError if the vocabulary lacks one of BERT's special tokens."""
        tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        assert isinstance(tokenizer, WordPieceTokenizer) and tokenizer.vocab_size == vocab_size
        longest = data.seq_length - SPECIAL_TOKENS
        super().__init__(data, name, source, samples, max_tokens=longest, seed=seed)
        self._tokenizer, self._seq_length, self._mask_prob = tokenizer, data.seq_length, data.mask_prob
        self._seed_words = [*seed_words(seed), SPLITS.index(name)]

    def _sample(self, run: Run, index: int) -> np.ndarray:
        """Tokens, token types and labels, int64 [3, s].

        Token types are 0 for [CLS], the first span and its [SEP], 1 for the second and its [SEP], -1 for padding.
        Labels are the original tokens at masked positions, -1 elsewhere, and at [CLS] 1 if the spans are swapped or 0.
        """
        tokens = self._tokens(run, self._tokenizer.vocab_size)
        first, second, swapped, random = self._pair(run, index)
        a, b = (tokens[part.start : part.stop] for part in (first, second))
        return pair_sample(a, b, swapped, self._tokenizer, self._seq_length, self._mask_prob, random)

    def _parts(self, run: Run, index: int) -> Sequence[range]:
        return self._pair(run, index)[:2]

    def _pair(self, run: Run, index: int) -> tuple[range, range, bool, np.random.RandomState]:
        """Both spans as ranges of tokens of ``run``, whether they are swapped, and the generator for what follows."""
        random = np.random.RandomState([*self._seed_words, *seed_words(index)])
        sizes = self.indexed.sizes[run.first : run.end]
        cut = int(sizes[: random.randint(1, len(sizes))].sum())
        a, b = range(cut), range(cut, int(sizes.sum()))
        swapped = random.random_sample() < 0.5
        if swapped:
            a, b = b, a
        return *truncate_pair(a, b, run.target, random), swapped, random


def pair_sample(
    a: np.ndarray,
    b: np.ndarray,
    swapped: bool,
    vocabulary: PairVocabulary,
    seq_length: int,
    mask_prob: float,
    random: np.random.RandomState,
) -> np.ndarray:
    """Tokens, token types and labels of the spans ``a`` and ``b``, int64 [3, s], as ``BertDataset`` returns them."""
    sample = np.full((3, seq_length), -1, np.int64)
    sample[0] = vocabulary.pad
    tokens = np.concatenate([[vocabulary.cls], a, [vocabulary.sep], b, [vocabulary.sep]])
    n, second = len(tokens), len(a) + 2
    sample[0, :n], sample[2, :n] = mask_tokens(tokens, vocabulary, mask_prob, random)
    sample[1, :second], sample[1, second:n] = 0, 1
    sample[2, 0] = swapped
    return sample


def truncate_pair(a: range, b: range, max_tokens: int, random: np.random.RandomState) -> tuple[range, range]:
    """Cut both spans to ``max_tokens`` in total, the longer one first; each token is cut from a random end."""
    length_of_a = min(len(a), max(max_tokens - len(b), max_tokens - max_tokens // 2))
    kept = []
    for tokens, length in ((a, length_of_a), (b, min(len(b), max_tokens - length_of_a))):
        start = random.binomial(len(tokens) - length, 0.5)
        kept.append(tokens[start : start + length])
    return kept[0], kept[1]


def mask_tokens(
    tokens: np.ndarray, vocabulary: PairVocabulary, mask_prob: float, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [n] -> tokens with a fraction ``mask_prob`` masked, and labels: masked tokens, -1 elsewhere.

    They are random runs of complete words, or fewer if no further word fits. As in BERT (Devlin et al., 2018), 80 % of
    them become [MASK], 10 % stay, and 10 % become a random token.
    """
    words = words_of(tokens, (vocabulary.cls, vocabulary.sep), vocabulary.continues)
    most = max(1, round(len(tokens) * mask_prob))
    runs = random_runs(words, lambda _: most, lambda: random.choice(RUN_LENGTHS, p=RUN_SHARES), random)
    positions = list(chain(*runs))
    labels = np.full_like(tokens, -1)
    labels[positions] = tokens[positions]
    draw = random.random_sample(len(positions))
    random_tokens = random.randint(0, vocabulary.vocab_size, len(positions))
    masked = tokens.copy()
    masked[positions] = np.where(draw < 0.8, vocabulary.mask, np.where(draw < 0.9, tokens[positions], random_tokens))
    return masked, labels
