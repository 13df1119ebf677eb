"""Divides documents of data sets into training, validation and test splits, and the base classes of samples."""

import contextlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.common.errors import ConfigError, DataError, first_line
from megatron.common.files import replace_file
from megatron.common.reading import read_json, type_problem
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.config.fields import is_decimal
from megatron.data.indexed_dataset import IndexedDataset, Known
from megatron.data.map_cache import cache_folder, digest, from_random_start


def split_weights(split: str) -> tuple[float, float, float]:
    """Parse ``"969, 30, 1"``: up to three weights, separated by commas, slashes or blanks; missing ones are 0.

    Raises ConfigError unless there are one to three numbers, none negative, and their sum is finite and above 0.
    """
    parts = re.split(r"\s*[,/]\s*|\s+", split.strip())
    weights = [float(part) for part in parts] if all(map(is_decimal, parts)) else []
    if not 1 <= len(weights) <= 3 or not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
        raise ConfigError(
            f'--split "{split}": expected one to three weights for training, validation and test, such as "969, 30, 1"'
        )
    training, validation, test = weights + [0.0] * (3 - len(weights))
    return training, validation, test


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Cut the documents ``0 .. num_documents - 1`` into three ranges in proportion to the weights of ``split``.

    As in Megatron-LM, each length is rounded separately, and the total rounding error is subtracted from every
    boundary, so that the last range ends with the last document.
    """
    weights = split_weights(split)
    bounds = list(accumulate(round(weight / sum(weights) * num_documents) for weight in weights))
    first, second, third = (max(bound - (bounds[-1] - num_documents), 0) for bound in bounds)
    return range(first), range(first, second), range(second, third)


SPLIT_NAMES = dict(zip(SPLITS, ("training", "validation", "test"), strict=True))


class Source(NamedTuple):
    """The documents of a data set that belong to a split."""

    share: Fraction
    """The share of the split's samples that come from this data set."""
    indexed: IndexedDataset
    documents: range


def seed_words(*numbers: int) -> list[int]:
    """Split 64-bit numbers into 32-bit words, to seed a ``RandomState``.

    NumPy guarantees the stream of ``RandomState``, not of the newer ``Generator``: a run that resumes after an upgrade
    must continue in the same order.
    """
    return [half for number in numbers for half in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)]


class Samples(ABC):
    """Base class of a data set with ``samples`` samples in the order of training."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        """Number of samples: the requested number or more."""
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        """The ``index``-th sample to train on, int64. Raises as ``take``."""
        return self.take([index])[0]

    map_files = ""
    """A pattern of the files of stored index maps; empty if none are stored."""

    @contextlib.contextmanager
    def reading_maps(self) -> Iterator[None]:
        """Raises DataError for a number in the index maps that is out of range. Large maps are checked only once."""
        try:
            yield
        except (IndexError, ValueError) as error:
            if not self.map_files:
                raise
            raise DataError(
                f"{self.map_files}: a number is out of range ({first_line(error)}): remove these files of index maps, "
                "and they are built again"
            ) from error

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """The samples of ``indices``, int64 [n, ...]. Raises IndexError, or DataError for a sample with an error."""
        if wrong := [index for index in indices if not 0 <= index < self._samples]:
            raise IndexError(wrong[0])
        with self.reading_maps():
            return self._read(indices)

    @abstractmethod
    def _read(self, indices: Sequence[int]) -> np.ndarray:
        """The samples of ``indices``, which are in range."""


class SourceSamples(Samples):
    """Base class of samples of one source. Subclasses take (data, split name, source, samples, vocab_size, seed)."""

    def __init__(self, source: Source, samples: int, epochs: int = 1) -> None:
        if epochs > _MAX_EPOCHS:
            most = f"{_MAX_EPOCHS:,} epochs at most: train on fewer samples, or load another checkpoint"
            raise DataError(f"{source.indexed.prefix}: {samples:,} samples are {epochs:,} epochs, and a run has {most}")
        super().__init__(samples)
        self.indexed, self.documents = source.indexed, source.documents

    stored_as = ""
    """Cache name of the arrays that ``prepare`` stores; empty if it stores none."""

    def prepare(self) -> bool:
        """Build and store the index maps of the first epoch if they are absent. Returns whether they are stored, so
        that other processes need not check."""
        return False

    @staticmethod
    @abstractmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """An error message for a source that does not hold a single sample of the split ``name``, else None."""


_MAX_EPOCHS = 1 << 32
"""The number of an epoch is a 32-bit word of a seed."""


def describe_split(data: DataConfig, name: str, source: Source) -> str:
    """Describe the part of ``source`` in the split ``name``, for messages."""
    cut = f' by --split "{data.split}"' if data.is_split else ""
    return f"the {SPLIT_NAMES[name]} split of {source.indexed.prefix}{cut}"


def advice(data: DataConfig, name: str, source: Source, *others: str) -> str:
    """Advice in the message about a source without a sample of the split ``name``; the most helpful flags first."""
    total, options = source.indexed.num_documents, list(others)
    if data.is_split:
        share = "--split 9,1,0" if total > 10 else f"--split {total - 1},1,0"
        has_more = name == "valid" and 1 < total and len(source.documents) < total // 10 + 1
        options.insert(len(others) if source.documents else 0, share if has_more else "another --split")
    if name != "train":
        options.append("--eval-iters 0")
    return f"use {', '.join(options)} or more text"


def has_split(data: DataConfig, name: str) -> bool:
    """Whether the split ``name`` has any data."""
    weights = dict(zip(SPLITS, split_weights(data.split), strict=True)) if data.is_split else {}
    return bool(data.mock_data or data.blends[name]) and (name == "train" or weights.get(name, 1) > 0)


def find_sources(
    data: DataConfig,
    samples: Mapping[str, int],
    *,
    check: Callable[[DataConfig, str, Source], str | None],
    skipped: list[str] | None = None,
) -> dict[str, tuple[Source, ...]]:
    """The sources of each split with ``samples`` to read.

    ``check`` returns an error message for a source without a single sample of the split, else None. If that happens for
    the test split of ``--split``, the test split is left out, and ``skipped`` gets the messages.

    Raises ConfigError without a data path or for an invalid ``--split``, and DataError with a line for each data set
    that is missing or damaged, and each split without a sample.
    """
    sources = {name: parts for name, parts in all_sources(data).items() if samples.get(name)}
    problems = {
        name: [message for part in parts if (message := check(data, name, part))] for name, parts in sources.items()
    }
    if data.is_split and problems.get("test"):
        del sources["test"]
        (skipped if skipped is not None else []).extend(problems.pop("test"))
    if errors := [message for messages in problems.values() for message in messages]:
        raise DataError(errors)
    return sources


def check_token_type(data: DataConfig, tokens: int) -> None:
    """Raises DataError if a data set stores its tokens in a type that cannot hold all ids below ``tokens``."""
    known = _read_known(data)
    for prefix in data.prefixes:
        dtype = IndexedDataset(prefix, cache=cache_folder(data, prefix), known=known.get(prefix)).dtype
        if np.iinfo(dtype).max < tokens - 1:
            raise DataError(
                f"{prefix}.bin stores tokens as {dtype.name}, which does not hold the {tokens} tokens of "
                f"{data.vocab_file}: it was made with another tokenizer; make it again with tools/preprocess_data.py"
            )


def _check_text(indexed: IndexedDataset) -> None:
    """Raises DataError if some sequences are not text."""
    if indexed.modes is not None and (others := np.count_nonzero(indexed.modes)):
        raise DataError(
            f"{indexed.idx_path} has {others:,} sequences that are no text (modes): tools/preprocess_data.py --format "
            f"images --input {indexed.idx_path} makes a data set of pretrain_vlm.py"
        )


def _known_file(data: DataConfig) -> Path:
    name = digest((data.prefixes, data.split if data.is_split else None))
    return cache_folder(data, data.prefixes[0]) / f"blend_{name}_known.json"


def _read_known(data: DataConfig) -> dict[str, Known]:
    """The recorded checks of the data sets of a blend, by prefix; one file for all, as there may be thousands."""
    with contextlib.suppress(OSError, ValueError):
        if len(data.prefixes) > 1 and not type_problem(dict[str, Known], tree := read_json(_known_file(data))):
            return {prefix: Known(*fields) for prefix, fields in tree.items()}
    return {}


def _write_known(data: DataConfig, opened: Mapping[str, IndexedDataset]) -> None:
    """Record the checks of data sets with large indexes; every process checks small ones."""
    known = {prefix: checked for prefix, indexed in opened.items() if (checked := indexed.known())}
    if len(opened) > 1 and any(opened[prefix].is_new for prefix in known):
        with contextlib.suppress(OSError), replace_file(_known_file(data), text=True, durable=False) as file:
            json.dump(known, file)


def all_sources(data: DataConfig) -> dict[str, tuple[Source, ...]]:
    """The sources of each split that has data, even if less than a sample. Raises as ``find_sources``."""
    if not data.prefixes:
        raise ConfigError("--data-path is missing: give the prefix of a data set made by tools/preprocess_data.py")
    known = _read_known(data)
    opened: dict[str, IndexedDataset] = {}
    documents: dict[str, dict[str, range]] = {}
    errors: dict[str, list[str]] = {}
    for prefix in from_random_start(data.prefixes):
        try:
            opened[prefix] = IndexedDataset(prefix, cache=cache_folder(data, prefix), known=known.get(prefix))
            if opened[prefix].is_new:
                _check_text(opened[prefix])
            total = opened[prefix].num_documents
            parts = split_documents(total, data.split) if data.is_split else [range(total)] * len(SPLITS)
            documents[prefix] = dict(zip(SPLITS, parts, strict=True))
            for part in parts:
                opened[prefix].tokens_of(part)
        except DataError as error:
            errors[prefix] = error.messages
    if errors:
        raise DataError([message for prefix in data.prefixes for message in errors.get(prefix, ())])
    _write_known(data, opened)
    return {
        name: tuple(Source(part.share, opened[part.prefix], documents[part.prefix][name]) for part in data.blends[name])
        for name in SPLITS
        if has_split(data, name)
    }
