"""Samples for fine-tuning T5: texts, and what the decoder is to write for each.

The text of PREFIX_input_document and its target are documents of the same number in PREFIX_input_document and
PREFIX_target_document, as ``tools/preprocess_data.py --json-keys input target`` writes them. Each ends with the end of
the vocabulary; what is longer than the model reads is cut before it.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS, target_prefix
from megatron.data.indexed_dataset import IndexedDataset, check_tokens
from megatron.data.splits import SPLIT_NAMES, Source
from megatron.data.t5_dataset import Shape, padded
from megatron.tokenizer import SpanVocabulary, span_vocabulary


class PairDataset:
    """Samples of some documents, in the order of training: each once in every epoch, which is shuffled by itself.

    Args:
        inputs, targets: the data sets.
        documents: those of them that belong to the split.
        samples: samples that are needed.
        vocabulary: the special tokens.
        shape: lengths of the samples.
        seed_words: seed of the order.
    """

    def __init__(
        self,
        inputs: IndexedDataset,
        targets: IndexedDataset,
        documents: range,
        samples: int,
        *,
        vocabulary: SpanVocabulary,
        shape: Shape,
        seed_words: Sequence[int],
    ) -> None:
        self._inputs, self._targets, self._documents = inputs, targets, documents
        self._samples, self._vocabulary, self._shape = samples, vocabulary, shape
        self._seed_words = seed_words
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """Samples in the data set, as many as were requested."""
        return self._samples

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, int64 [n, encoder + 2 x decoder], as ``padded`` makes them.

        Raises DataError if a token is not in the vocabulary.
        """
        return np.stack([self._sample(index) for index in indices])

    def _sample(self, index: int) -> np.ndarray:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        epoch, at = divmod(index, len(self._documents))
        document = self._documents[int(self._order(epoch)[at])]
        end = [self._vocabulary.eos]
        text = [*self._read(self._inputs, document)[: self._shape.encoder - 1], *end]
        predicted = self._read(self._targets, document)[: self._shape.decoder - 1].tolist()
        return padded(text, predicted, self._vocabulary, self._shape)

    def _read(self, indexed: IndexedDataset, document: int) -> np.ndarray:
        first, end = indexed.doc_idx[document : document + 2]
        return check_tokens(indexed, indexed.run(first, end), f"document {document}", self._vocabulary.size)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.RandomState([*self._seed_words, epoch]).permutation(len(self._documents))


def pair_error(data: DataConfig, name: str, source: Source) -> str | None:
    """Why the data sets of ``source`` are no texts with targets of the split ``name``; None if they are."""
    _, indexed, documents = source
    if target_prefix(indexed.prefix) == indexed.prefix:
        return (
            f"--sft: {indexed.prefix} is not named as texts with targets are: make it with tools/preprocess_data.py "
            "--json-keys input target, and name PREFIX_input_document"
        )
    targets = IndexedDataset(target_prefix(indexed.prefix))
    if targets.num_documents != indexed.num_documents:
        return (
            f"{indexed.prefix} has {indexed.num_documents} documents, and {targets.prefix} {targets.num_documents}: "
            "make both again, from lines that have an input and a target"
        )
    return None if len(documents) else f"the {SPLIT_NAMES[name]} split of {indexed.prefix} holds no document"


def pair_samples(
    data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
) -> PairDataset:
    """``samples`` samples of one source of the split ``name``. Raises DataError as ``span_vocabulary``."""
    vocabulary = span_vocabulary(data)
    assert vocabulary.size == vocab_size
    return PairDataset(
        source.indexed,
        IndexedDataset(target_prefix(source.indexed.prefix)),
        source.documents,
        samples,
        vocabulary=vocabulary,
        shape=Shape.of(data),
        seed_words=[seed & 0xFFFFFFFF, seed >> 32, SPLITS.index(name)],
    )
