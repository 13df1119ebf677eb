"""Samples for BERT: two runs of sentences, in their order or swapped, with some of their words hidden.

    [CLS] first run [SEP] second run [SEP] [PAD] ...

s sequence
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.config.errors import DataError
from megatron.data.index_maps import SentenceMaps, SentenceStream
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.map_cache import cache_folder, cached_sentence_maps, digest
from megatron.data.sources import SPLIT_NAMES, Source
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.wordpiece import WordPieceTokenizer


def hide(
    tokens: np.ndarray, known: WordPieceTokenizer, mask_prob: float, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64 [n] -> the same with a fraction of ``mask_prob`` hidden, and labels: those tokens, -1 elsewhere."""
    places = choose(tokens, known, max(1, round(len(tokens) * mask_prob)), random)
    labels = np.full_like(tokens, -1)
    labels[places] = tokens[places]
    fate = random.random_sample(len(places))
    anything = random.randint(0, known.vocab_size, len(places))
    shown = tokens.copy()
    shown[places] = np.where(fate < 0.8, known.mask, np.where(fate < 0.9, tokens[places], anything))
    return shown, labels


def choose(tokens: np.ndarray, known: WordPieceTokenizer, most: int, random: np.random.RandomState) -> np.ndarray:
    """Places of the pieces of some words of ``tokens``, ``most`` of them or as near below as whole words come."""
    candidates = np.flatnonzero((tokens != known.cls) & (tokens != known.sep))
    # A word whose first pieces were cut off begins behind [CLS] or [SEP].
    goes_on = known.continues[tokens[candidates]] & (np.diff(candidates, prepend=-1) == 1)
    words = np.split(candidates, np.flatnonzero(~goes_on)[1:])
    chosen: list[np.ndarray] = []
    left = most
    for number in random.permutation(len(words)):
        if len(words[number]) <= left:
            chosen.append(words[number])
            left -= len(words[number])
        if not left:
            break
    return np.concatenate([np.empty(0, np.int64), *chosen])


FRAME = 3
"""Tokens around the sentences: [CLS], and a [SEP] behind each."""


class BertDataset:
    """Samples of some documents of a data set of sentences, in the order of training.

    A sample depends on the seed and its number alone. Sample n of every epoch is another: another pair, other words.

    Args:
        indexed: the data set; its sequences are sentences.
        first_sentence: sentence of the data set that is number 0 of the maps.
        maps: which sentences make which sample.
        tokenizer: what the tokens mean.
        data: how long samples are, and how much of them is hidden.
        seed, salt: seed of what is drawn for each sample, and what tells apart data sets that share it.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        first_sentence: int,
        maps: SentenceMaps,
        *,
        tokenizer: WordPieceTokenizer,
        data: DataConfig,
        seed: int,
        salt: int,
    ) -> None:
        self._indexed, self._first, self._maps, self._tokenizer = indexed, first_sentence, maps, tokenizer
        self._seq_length, self._mask_prob = data.seq_length, data.mask_prob
        self._seed_words = [seed & 0xFFFFFFFF, seed >> 32, salt]

    def __len__(self) -> int:
        """Samples in the data set: whole epochs, at least as many as were asked for."""
        return len(self._maps.order)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens, segments and labels of the ``index``-th sample to train on, int64 [3, s].

        Segments are 0 for [CLS] and the first run, 1 for the second, -1 for padding, each run with its [SEP].
        Labels are the tokens that were hidden, -1 elsewhere, and for [CLS] whether the runs were swapped, 0 or 1.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        first, end, target = map(int, self._maps.runs[self._maps.order[index]])
        random = np.random.RandomState([*self._seed_words, index & 0xFFFFFFFF, index >> 32])
        cut = random.randint(first + 1, end)
        pair = [self._run(first, cut), self._run(cut, end)]
        swapped = int(random.random_sample() < 0.5)
        if swapped:
            pair.reverse()
        a, b = shorten(*pair, target, random)

        known, sample = self._tokenizer, np.full((3, self._seq_length), -1, np.int64)
        sample[0] = known.pad
        tokens = np.concatenate([[known.cls], a, [known.sep], b, [known.sep]])
        n, second = len(tokens), len(a) + 2
        sample[0, :n], sample[2, :n] = hide(tokens, known, self._mask_prob, random)
        sample[1, :second], sample[1, second:n] = 0, 1
        sample[2, 0] = swapped
        return sample

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, int64 [n, 3, s]. Raises DataError as each does."""
        return np.stack([self[index] for index in indices])

    def _run(self, first: int, end: int) -> np.ndarray:
        """Tokens of some sentences, one behind the other, int64."""
        tokens = np.concatenate([self._indexed.get(self._first + n) for n in range(first, end)]).astype(np.int64)
        if (wrong := (tokens < 0) | (tokens >= self._tokenizer.vocab_size)).any():
            raise DataError(
                f"{self._indexed.bin_path} holds token {tokens[wrong.argmax()]} in sentences {self._first + first} to "
                f"{self._first + end - 1}, but the vocabulary ends at {self._tokenizer.vocab_size - 1}: name the "
                "vocabulary that the data set was made with, or make the data set again"
            )
        return tokens


def shorten(a: np.ndarray, b: np.ndarray, room: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Both with ``room`` tokens at most: the longer one loses first, each token from its front or its back."""
    of_a = min(len(a), max(room - len(b), room - room // 2))
    kept = []
    for tokens, length in ((a, of_a), (b, min(len(b), room - of_a))):
        front = random.binomial(len(tokens) - length, 0.5)
        kept.append(tokens[front : front + length])
    return kept[0], kept[1]


def bert_fault(data: DataConfig, name: str, source: Source) -> str | None:
    """A message for a source that does not hold a single pair of sentences for the split ``name``."""
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
    """The samples that the split ``name`` has of one source, ``samples`` at the least.

    Raises DataError where the vocabulary lacks one of BERT's own tokens.
    """
    indexed, documents = source.indexed, source.documents
    tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
    assert isinstance(tokenizer, WordPieceTokenizer) and tokenizer.vocab_size == vocab_size
    salt, bounds = SPLITS.index(name), indexed.doc_idx[documents.start : documents.stop + 1]
    stream = SentenceStream(
        sizes=indexed.sizes[bounds[0] : bounds[-1]],
        bounds=bounds - bounds[0],
        room=data.seq_length - FRAME,
        short_seq_prob=data.short_seq_prob,
        wanted=samples,
        seed=seed,
        salt=salt,
    )
    origin = (indexed.content_hash(), documents, name, seed, stream.room, data.short_seq_prob, samples)
    cache_name = f"{Path(indexed.prefix).name}_{name}_{samples}np_{data.seq_length}sl_{seed}s_{digest(origin)}"
    maps = cached_sentence_maps(cache_folder(data, indexed.prefix), cache_name, stream)
    return BertDataset(indexed, int(bounds[0]), maps, tokenizer=tokenizer, data=data, seed=seed, salt=salt)
