"""Samples for GPT-2: runs of ``seq_length + 1`` tokens out of shuffled documents, without padding."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.config import DataConfig
from megatron.data.index_maps import IndexMaps, SampleStream
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.map_cache import cached_maps
from megatron.data.splits import split_documents, split_weights
from megatron.errors import ConfigError, DataError

SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}


class GPT2Dataset:
    """Samples of some documents of a data set, in the order of training.

    Args:
        indexed: the data set.
        documents: the documents to use.
        maps: order of samples over these documents, numbered from 0.
        vocab_size: tokens at or above it are an error.
    """

    def __init__(self, indexed: IndexedDataset, documents: range, maps: IndexMaps, *, vocab_size: int) -> None:
        self._indexed = indexed
        self._first_document = documents.start
        self._starts = indexed.document_starts[documents.start : documents.stop + 1]
        self._maps = maps
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """Samples in the data set: whole epochs, at least as many as were asked for."""
        return len(self._maps.shuffle)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of the ``index``-th sample to train on, int64 [seq_length + 1].

        Raises:
            DataError: a token is not in the vocabulary.
        """
        sample = int(self._maps.shuffle[index])
        (first, begin), (last, end) = self._maps.samples[sample : sample + 2].tolist()
        pieces = []
        for position in range(first, last + 1):
            document = int(self._maps.documents[position])
            # The last token of a sample is the first of the next one.
            stop = end + 1 if position == last else self._starts[document + 1] - self._starts[document]
            pieces.append(self._piece(document, begin if position == first else 0, int(stop)))
        return np.concatenate(pieces)

    def _piece(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` of a document, checked, int64."""
        tokens = self._indexed.span(int(self._starts[document]) + start, stop - start).astype(np.int64)
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(
                f"{self._indexed.bin_path} holds token {tokens[at]} in document {self._first_document + document} at "
                f"offset {start + at}, but the vocabulary ends at {self._vocab_size - 1}: name the vocabulary "
                "that the data set was made with, or make the data set again"
            )
        return tokens


@dataclass(frozen=True)
class Datasets:
    """What a run reads. A data set is None where nothing is to be read from it."""

    train: Sequence[np.ndarray] | None
    valid: Sequence[np.ndarray] | None
    test: Sequence[np.ndarray] | None


def check_data(data: DataConfig, *, train_iters: int, eval_iters: int) -> None:
    """Look for the faults of a data set that its index shows, without building anything.

    Raises:
        ConfigError: no data path, or a ``--split`` that cannot be read.
        DataError: files that are missing or damaged, or a split in use without a single sample.
    """
    _splits_in_use(data, open_dataset(data), train_iters=train_iters, eval_iters=eval_iters)


def build_datasets(
    data: DataConfig,
    *,
    vocab_size: int,
    global_batch_size: int,
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    seed: int,
) -> Datasets:
    """Open the data set and build, or read from the cache, the samples of its splits.

    Training has ``train_iters`` global batches, validation ``eval_iters`` for each evaluation (every
    ``eval_interval`` iterations, and one at the end), the test ``eval_iters``. A split whose count or
    weight is 0 is None. Any number of processes may call this at once.

    Raises:
        ConfigError, DataError: as ``check_data``.
    """
    indexed = open_dataset(data, warmup=data.mmap_warmup)
    batches = batches_of_splits(train_iters, eval_interval, eval_iters)
    datasets: dict[str, Sequence[np.ndarray] | None] = dict.fromkeys(SPLIT_NAMES)
    for name, documents in _splits_in_use(data, indexed, train_iters=train_iters, eval_iters=eval_iters).items():
        stream = SampleStream(
            lengths=np.diff(indexed.document_starts[documents.start : documents.stop + 1]),
            seq_length=data.seq_length,
            wanted=batches[name] * global_batch_size,
            seed=seed,
            salt=list(SPLIT_NAMES).index(name),
        )
        maps = cached_maps(cache_folder(data), _cache_name(indexed, name, documents, stream), stream)
        datasets[name] = GPT2Dataset(indexed, documents, maps, vocab_size=vocab_size)
    return Datasets(**datasets)


def open_dataset(data: DataConfig, *, warmup: bool = False) -> IndexedDataset:
    """Open the data set of ``--data-path``."""
    if not data.data_path:
        raise ConfigError("--data-path is missing: give the prefix of a data set made by tools/preprocess_data.py")
    return IndexedDataset(data.data_path, warmup=warmup)


def batches_of_splits(train_iters: int, eval_interval: int, eval_iters: int) -> dict[str, int]:
    """Global batches that a run takes of each split."""
    return {"train": train_iters, "valid": (train_iters // eval_interval + 1) * eval_iters, "test": eval_iters}


def documents_in_use(
    indexed: IndexedDataset, data: DataConfig, *, train_iters: int, eval_iters: int
) -> dict[str, range]:
    """The documents of each split that is to be read."""
    ranges = dict(zip(SPLIT_NAMES, split_documents(indexed.num_documents, data.split), strict=True))
    weights = dict(zip(SPLIT_NAMES, split_weights(data.split), strict=True))
    in_use = {
        "train": train_iters > 0,
        "valid": eval_iters > 0 and weights["valid"] > 0,
        "test": eval_iters > 0 and weights["test"] > 0,
    }
    return {name: documents for name, documents in ranges.items() if in_use[name]}


def _splits_in_use(data: DataConfig, indexed: IndexedDataset, *, train_iters: int, eval_iters: int) -> dict[str, range]:
    """The documents of each split that is to be read; DataError for those without a sample."""
    starts = indexed.document_starts
    chosen = documents_in_use(indexed, data, train_iters=train_iters, eval_iters=eval_iters)
    faults = []
    for name, documents in chosen.items():
        tokens = int(starts[documents.stop] - starts[documents.start])
        if tokens < data.seq_length + 1:
            which = f"documents {documents.start} to {documents.stop - 1}" if documents else "no document"
            faults.append(
                f'the {SPLIT_NAMES[name]} split of {indexed.prefix} by --split "{data.split}" ({which} of '
                f"{indexed.num_documents}: {tokens} tokens) holds no sample of {data.seq_length}+1 tokens: use more "
                "text, a smaller --seq-length or another --split"
            )
    if faults:
        raise DataError(faults)
    return chosen


def cache_folder(data: DataConfig) -> Path:
    """Where index maps are kept: ``--data-cache-path``, or beside the data."""
    return Path(data.data_cache_path or Path(str(data.data_path)).parent / "index-cache")


def _cache_name(indexed: IndexedDataset, name: str, documents: range, stream: SampleStream) -> str:
    """A name for a stream's maps: readable, and with a hash of whatever they depend on."""
    origin = (indexed.content_hash(), documents, name, stream.seed, stream.seq_length, stream.samples)
    digest = hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
    prefix = Path(indexed.prefix).name
    return f"{prefix}_{name}_{stream.samples}ns_{stream.seq_length}sl_{stream.seed}s_{digest}"
