"""Which documents of which data sets are for training, for validation and for the test."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.config.errors import ConfigError, DataError
from megatron.data.indexed_dataset import IndexedDataset


def split_weights(split: str) -> tuple[float, float, float]:
    """Parse ``"969, 30, 1"``: up to three weights, divided by commas, slashes or blanks; missing ones are 0.

    Raises:
        ConfigError: not one to three numbers, a negative one, or none above 0.
    """
    try:
        weights = [float(part) for part in re.split(r"\s*[,/]\s*|\s+", split.strip())]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise ConfigError(
            f'--split "{split}": expected one to three weights for training, validation and test, such as "969, 30, 1"'
        )
    training, validation, test = weights + [0.0] * (3 - len(weights))
    return training, validation, test


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Cut the documents ``0 .. num_documents - 1`` into three runs in proportion to the weights of ``split``.

    As in the classic programs each length is rounded by itself, and what the rounding has made too
    many or too few is taken from every boundary, so that the last run ends with the last document.
    """
    weights = split_weights(split)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / sum(weights) * num_documents))
    excess = bounds[-1] - num_documents
    first, second, third = (max(bound - excess, 0) for bound in bounds[1:])
    return range(first), range(first, second), range(second, third)


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
