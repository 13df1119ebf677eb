"""Which documents of which data sets are for training, for validation and for the test."""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from megatron.config import DataConfig
from megatron.config.files import SPLITS
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.splits import split_documents, split_weights
from megatron.errors import ConfigError, DataError

SPLIT_NAMES = dict(zip(SPLITS, ("training", "validation", "test"), strict=True))


class Source(NamedTuple):
    """What a split has of one data set."""

    share: Fraction
    """Its part of the split's samples."""
    indexed: IndexedDataset
    documents: range


def has_split(data: DataConfig, name: str) -> bool:
    """Whether there is anything to read for a split."""
    weights = dict(zip(SPLITS, split_weights(data.split), strict=True)) if data.is_split else {}
    return bool(data.blends[name]) and (name == "train" or weights.get(name, 1) > 0)


def find_sources(
    data: DataConfig,
    *,
    fault: Callable[[DataConfig, str, Source], str | None],
    train_iters: int,
    eval_iters: int,
    warmup: bool = False,
) -> dict[str, tuple[Source, ...]]:
    """The sources of each split that is to be read; ``warmup`` reads all of them once.

    ``fault`` is a message for a source of a split that holds not a single sample, or None.

    Raises:
        ConfigError: no data path, or a ``--split`` that cannot be read.
        DataError: with a line for each data set that is missing or damaged, and each split without a sample.
    """
    wanted = {"train": train_iters > 0, "valid": eval_iters > 0, "test": eval_iters > 0}
    sources = {name: parts for name, parts in all_sources(data, warmup=warmup).items() if wanted[name]}
    if faults := [said for name, parts in sources.items() for part in parts if (said := fault(data, name, part))]:
        raise DataError(faults)
    return sources


def all_sources(data: DataConfig, *, warmup: bool = False) -> dict[str, tuple[Source, ...]]:
    """The sources of each split that has any, however little they hold. Raises as ``find_sources`` does."""
    if not data.prefixes:
        raise ConfigError("--data-path is missing: give the prefix of a data set made by tools/preprocess_data.py")
    opened = _open_all(data, warmup)
    return {
        name: tuple(
            Source(part.share, opened[part.prefix], _documents(data, opened[part.prefix], name))
            for part in data.blends[name]
        )
        for name in SPLITS
        if has_split(data, name)
    }


def _open_all(data: DataConfig, warmup: bool) -> dict[str, IndexedDataset]:
    opened, faults = {}, []
    for prefix in data.prefixes:
        try:
            opened[prefix] = IndexedDataset(prefix, warmup=warmup)
        except DataError as error:
            faults += error.messages
    if faults:
        raise DataError(faults)
    return opened


def _documents(data: DataConfig, indexed: IndexedDataset, name: str) -> range:
    if not data.is_split:
        return range(indexed.num_documents)
    return dict(zip(SPLITS, split_documents(indexed.num_documents, data.split), strict=True))[name]
