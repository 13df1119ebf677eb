"""Samples for BERT: two spans of sentences, in their order or swapped, with some of their words masked.

    [CLS] first span [SEP] second span [SEP] [PAD] ...

Two maps hold which sentences make up which sample:

    spans  [n, 3]         first sentence, the one after the last, and tokens at most, of each pair of spans
    order  [epochs * n]   the pair that is the i-th to be trained on; each epoch is shuffled by itself

As in ``megatron.data.index_maps``, the order is built for a window of some epochs at a time.

s sequence
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.config.errors import DataError
from megatron.data.index_maps import window_epochs
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.map_cache import cache_folder, cached, cached_window, digest
from megatron.data.mapped_files import check_mapped
from megatron.data.splits import SPLIT_NAMES, Source
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.null import NullTokenizer
from megatron.tokenizer.wordpiece import WordPieceTokenizer

PairVocabulary = WordPieceTokenizer | NullTokenizer
"""Tokenizers with the tokens that frame, pad and mask a pair of sentences."""
SPECIAL_TOKENS = 3
"""Tokens of a sample besides the sentences: [CLS], and a [SEP] after each span."""


@dataclass(frozen=True)
class SentenceMaps:
    """The two maps, of which ``order`` is that of the first window; see the top of the file."""

    spans: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class SentenceStream:
    """The stream of pairs of spans of some documents.

    Attributes:
        sizes: tokens of each sentence, int32 [sentences].
        bounds: first sentence of each document, and finally the number of sentences, int64 [documents + 1].
        max_tokens: tokens of both spans of a sample, at most.
        short_seq_prob: probability that a sample is shorter.
        requested: samples needed; the stream holds whole epochs, so more.
        seed: seed of the lengths and of the order.
        salt: distinguishes streams that share a seed.
        fewest: sentences of a sample, at least; of BERT one for each span.
    """

    sizes: np.ndarray
    bounds: np.ndarray
    max_tokens: int
    short_seq_prob: float
    requested: int
    seed: int
    salt: int = 0
    fewest: int = 2
    names: ClassVar[tuple[str, ...]] = ("runs", "order")
    """Names of the maps on disk."""

    @property
    def nbytes(self) -> int:
        """Bytes of the maps that ``build`` returns, at least: of a pair for each document that has one."""
        return 32 * int(np.count_nonzero(np.diff(self.bounds) >= self.fewest))

    def build(self) -> dict[str, np.ndarray]:
        """Compute the maps of a stream with a document of enough sentences; the order is that of the first window."""
        spans = self._spans()
        return {"runs": spans, "order": self.order(len(spans), self.window(len(spans), 0))}

    def fits(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have shapes that those of this stream can have."""
        spans, order = (maps[name] for name in self.names)
        n = len(spans)
        return n > 0 and spans.shape == (n, 3) and order.shape == (len(self.window(n, 0)) * n,)

    def window(self, pairs: int, number: int) -> range:
        """The epochs of the ``number``-th window, from 0, of a stream of so many pairs of spans."""
        epochs, size = -(-self.requested // pairs), window_epochs(pairs)
        return range(epochs)[number * size : (number + 1) * size]

    def order(self, pairs: int, epochs: range) -> np.ndarray:
        """The order of the pairs in each of ``epochs``, int64 [epochs * pairs]."""
        orders = [self._random(1, epoch).permutation(pairs) for epoch in epochs]
        return np.concatenate([np.empty(0, np.int64), *orders])

    def _spans(self) -> np.ndarray:
        """All pairs of spans, int64 [n, 3]; computed for all documents at once, the next pair of each at a time."""
        tokens = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])  # before each sentence, and in all
        begin, stop = (side[np.diff(self.bounds) >= self.fewest] for side in (self.bounds[:-1], self.bounds[1:]))
        random, spans = self._random(0, 0), []
        while len(begin):
            is_short = random.random_sample(len(begin)) < self.short_seq_prob
            target = np.where(is_short, random.randint(2, self.max_tokens + 1, len(begin)), self.max_tokens)
            end = np.maximum(np.searchsorted(tokens, tokens[begin] + target), begin + self.fewest)
            end = np.where(stop - end < self.fewest, stop, end)
            spans.append(np.stack([begin, end, target], axis=1))
            begin, stop = end[end < stop], stop[end < stop]
        whole = np.concatenate(spans)
        return whole[whole[:, 0].argsort()]

    def _random(self, purpose: int, epoch: int) -> np.random.RandomState:
        """A generator of its own for every purpose; ``RandomState``, since NumPy has frozen its stream."""
        return np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32, self.salt, purpose, epoch])


@dataclass(frozen=True)
class OrderWindow:
    """The order of the pairs in a later window of a stream."""

    stream: SentenceStream
    pairs: int
    epochs: range
    names: ClassVar[tuple[str, ...]] = ("order",)

    @property
    def nbytes(self) -> int:
        """Bytes of the map."""
        return 8 * self.pairs * len(self.epochs)

    def build(self) -> dict[str, np.ndarray]:
        """Compute the map."""
        return {"order": self.stream.order(self.pairs, self.epochs)}

    def fits(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have the shape of that which ``build`` returns."""
        return maps["order"].shape == (self.pairs * len(self.epochs),)


class BertDataset:
    """Samples of some documents of a data set of sentences, in the order of training.

    A sample depends on the seed and its index alone. Sample n of every epoch differs: another pair, other masked words.

    Args:
        indexed: the data set; its sequences are sentences.
        first_sentence: sentence of the data set that is number 0 of the maps.
        maps: which sentences make up which sample.
        later_order: the order of the pairs in the window with a number from 1.
        samples: samples that are needed.
        tokenizer: the vocabulary of the tokens.
        data: sequence length and masking probability.
        seed, salt: seed of what is drawn for each sample, and a number that distinguishes data sets that share it.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        first_sentence: int,
        maps: SentenceMaps,
        later_order: Callable[[int], np.ndarray],
        samples: int,
        *,
        tokenizer: WordPieceTokenizer,
        data: DataConfig,
        seed: int,
        salt: int,
    ) -> None:
        self._indexed, self._first, self._maps, self._tokenizer = indexed, first_sentence, maps, tokenizer
        self._seq_length, self._mask_prob = data.seq_length, data.mask_prob
        self._seed_words = [seed & 0xFFFFFFFF, seed >> 32, salt]
        self._later_order = lru_cache(maxsize=2)(later_order)
        pairs = len(maps.spans)
        self._samples, self._window = -(-samples // pairs) * pairs, window_epochs(pairs) * pairs

    def __len__(self) -> int:
        """Samples in the data set: whole epochs, at least as many as were requested."""
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens, token types and labels of the ``index``-th sample to train on, int64 [3, s].

        Token types are 0 for [CLS] and the first span, 1 for the second, -1 for padding, each span with its [SEP].
        Labels are the tokens that were masked, -1 elsewhere, and for [CLS] whether the spans were swapped, 0 or 1.
        Raises DataError if a token is not in the vocabulary.
        """
        if not 0 <= index < self._samples:
            raise IndexError(index)
        number, at = divmod(index, self._window)
        order = self._later_order(number) if number else self._maps.order
        check_mapped(self._maps.spans, order)
        first, end, target = map(int, self._maps.spans[order[at]])
        random = np.random.RandomState([*self._seed_words, index & 0xFFFFFFFF, index >> 32])
        cut = random.randint(first + 1, end)
        tokens = self._tokenizer.vocab_size
        a, b = (
            read_sentences(self._indexed, self._first + begin, self._first + stop, tokens)
            for begin, stop in ((first, cut), (cut, end))
        )
        swapped = random.random_sample() < 0.5
        if swapped:
            a, b = b, a
        a, b = truncate_pair(a, b, target, random)
        return pair_sample(a, b, swapped, self._tokenizer, self._seq_length, self._mask_prob, random)

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, int64 [n, 3, s]. Raises DataError as each does."""
        return np.stack([self[index] for index in indices])


def read_sentences(indexed: IndexedDataset, first: int, end: int, vocab_size: int) -> np.ndarray:
    """Tokens of consecutive sentences, int64. Raises DataError if one is not in a vocabulary of that size."""
    tokens = np.concatenate([indexed.get(n) for n in range(first, end)]).astype(np.int64)
    if (wrong := (tokens < 0) | (tokens >= vocab_size)).any():
        raise DataError(
            f"{indexed.bin_path} holds token {tokens[wrong.argmax()]} in sentences {first} to {end - 1}, but the "
            f"vocabulary ends at {vocab_size - 1}: name the vocabulary that the data set was made with, or make the "
            "data set again"
        )
    return tokens


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


def truncate_pair(
    a: np.ndarray, b: np.ndarray, max_tokens: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Both with ``max_tokens`` in all at most: the longer one is cut first, each token from its start or its end."""
    length_of_a = min(len(a), max(max_tokens - len(b), max_tokens - max_tokens // 2))
    kept = []
    for tokens, length in ((a, length_of_a), (b, min(len(b), max_tokens - length_of_a))):
        start = random.binomial(len(tokens) - length, 0.5)
        kept.append(tokens[start : start + length])
    return kept[0], kept[1]


def mask_tokens(
    tokens: np.ndarray, vocabulary: PairVocabulary, mask_prob: float, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [n] -> the same with a fraction of ``mask_prob`` masked, and labels: those tokens, -1 elsewhere.

    As in BERT (Devlin et al., 2018), of 10 masked tokens 8 become [MASK], one is kept, and one becomes any token.
    """
    positions = choose_masked(tokens, vocabulary, max(1, round(len(tokens) * mask_prob)), random)
    labels = np.full_like(tokens, -1)
    labels[positions] = tokens[positions]
    draw = random.random_sample(len(positions))
    any_token = random.randint(0, vocabulary.vocab_size, len(positions))
    masked = tokens.copy()
    masked[positions] = np.where(draw < 0.8, vocabulary.mask, np.where(draw < 0.9, tokens[positions], any_token))
    return masked, labels


def choose_masked(
    tokens: np.ndarray, vocabulary: PairVocabulary, most: int, random: np.random.RandomState
) -> np.ndarray:
    """Positions of some whole words of ``tokens``: ``most`` of them, or a little fewer if no word fits."""
    candidates = np.flatnonzero((tokens != vocabulary.cls) & (tokens != vocabulary.sep))
    # A word whose first tokens were cut off begins after [CLS] or [SEP].
    continues = vocabulary.continues[tokens[candidates]] & (np.diff(candidates, prepend=-1) == 1)
    words = np.split(candidates, np.flatnonzero(~continues)[1:])
    chosen: list[np.ndarray] = []
    for number in random.permutation(len(words)):
        if len(words[number]) <= most:
            chosen.append(words[number])
            most -= len(words[number])
    return np.concatenate([np.empty(0, np.int64), *chosen])


def bert_error(data: DataConfig, name: str, source: Source) -> str | None:
    """An error message for a source that does not hold a single sample of the split ``name``, else None."""
    _, indexed, documents = source
    if (np.diff(indexed.doc_idx[documents.start : documents.stop + 1]) >= 2).any():
        return None
    cut, advice = (f' by --split "{data.split}"', " or another --split") if data.is_split else ("", "")
    return (
        f"the {SPLIT_NAMES[name]} split of {indexed.prefix}{cut} ({len(documents)} of {indexed.num_documents} "
        "documents) holds no document of two sentences: make the data set with tools/preprocess_data.py "
        f"--split-sentences, or use more text{advice}"
    )


def bert_samples(
    data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
) -> BertDataset:
    """At least ``samples`` samples of one source of the split ``name``.

    Raises DataError if the vocabulary lacks one of BERT's own tokens.
    """
    tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    assert isinstance(tokenizer, WordPieceTokenizer) and tokenizer.vocab_size == vocab_size
    first, maps, later_order = sentence_maps(
        data, name, source, samples, max_tokens=data.seq_length - SPECIAL_TOKENS, fewest=2, seed=seed
    )
    return BertDataset(
        source.indexed,
        first,
        maps,
        later_order,
        samples,
        tokenizer=tokenizer,
        data=data,
        seed=seed,
        salt=SPLITS.index(name),
    )


def sentence_maps(
    data: DataConfig, name: str, source: Source, samples: int, *, max_tokens: int, fewest: int, seed: int
) -> tuple[int, SentenceMaps, Callable[[int], np.ndarray]]:
    """The maps of a source of the split ``name``, built or read from the cache.

    Its first sentence, the maps, and a function of the number of a window that returns the order in it.
    """
    indexed, documents = source.indexed, source.documents
    salt, bounds = SPLITS.index(name), indexed.doc_idx[documents.start : documents.stop + 1]
    stream = SentenceStream(
        sizes=indexed.sizes[bounds[0] : bounds[-1]],
        bounds=bounds - bounds[0],
        max_tokens=max_tokens,
        short_seq_prob=data.short_seq_prob,
        requested=samples,
        seed=seed,
        salt=salt,
        fewest=fewest,
    )
    origin: tuple = (indexed.content_hash(), documents, name, seed, stream.max_tokens, data.short_seq_prob, samples)
    origin += (fewest,) if fewest != 2 else ()
    cache_name = f"{Path(indexed.prefix).name}_{name}_{samples}np_{data.seq_length}sl_{seed}s_{digest(origin)}"
    folder = cache_folder(data, indexed.prefix)
    maps = cached(folder, cache_name, stream)
    pairs = len(maps["runs"])

    def later_order(number: int) -> np.ndarray:
        epochs = stream.window(pairs, number)
        window, name = OrderWindow(stream, pairs, epochs), f"{cache_name}_from{epochs.start}"
        return cached_window(folder, name, window, first_epoch=epochs.start, epochs=window_epochs(pairs))["order"]

    return int(bounds[0]), SentenceMaps(spans=maps["runs"], order=maps["order"]), later_order
