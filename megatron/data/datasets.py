"""The data sets of a run: the samples of each split, from one data set or a blend of several."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from megatron.common.errors import ConfigError
from megatron.config import DataConfig, TrainConfig
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import BertDataset
from megatron.data.blend_order import BlendOrder, BlendWindow
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.image_dataset import ImageDataset
from megatron.data.indexed_dataset import Span
from megatron.data.map_cache import Form, Recipe, cache_folder, cached, digest, from_anywhere
from megatron.data.mock_dataset import mock_samples
from megatron.data.sft_dataset import SFTDataset
from megatron.data.splits import OrderedSamples, Source, find_sources, has_split, split_weights
from megatron.data.t5_dataset import PairDataset, T5Dataset

PretrainingSamples: TypeAlias = GPT2Dataset | BertDataset | T5Dataset
IndexedSamples: TypeAlias = PretrainingSamples | SFTDataset | PairDataset


def _kind(data: DataConfig, masked_lm: bool) -> type[IndexedSamples]:
    """The samples of a run: of masked language models pairs of sentences, or a text with spans taken out if a decoder
    reads those."""
    if data.decoder_seq_length:
        return PairDataset if data.sft else T5Dataset
    if masked_lm:
        return BertDataset
    if data.image_format:
        return ImageDataset
    return SFTDataset if data.sft else GPT2Dataset


def check_data(data: DataConfig, samples: Mapping[str, int], *, masked_lm: bool = False) -> list[str]:
    """Check the data sets of splits with ``samples`` as far as their indexes show errors; nothing is built.

    Returns a message for each part of an empty test split, which is not evaluated. Raises as ``find_sources``.
    """
    if data.mock_data:
        split_weights(data.split)
        return []
    skipped: list[str] = []
    find_sources(data, samples, check=_kind(data, masked_lm).problem, skipped=skipped)
    return [f"there is no evaluation on the test split: {message}" for message in skipped]


class BlendedDataset(OrderedSamples):
    """``samples`` samples of the data sets ``parts``, in the ``order`` of training."""

    def __init__(self, parts: Sequence[IndexedSamples], order: BlendOrder, samples: int) -> None:
        super().__init__(samples)
        self.parts, self.order = parts, order

    def count_images(self, indices: Sequence[int]) -> np.ndarray:
        """How many images some samples have, int64 [n]."""
        return np.array(self._of_parts(indices, lambda part, places: part.count_images(places)), np.int64)

    def images(self, indices: Sequence[int]) -> list[np.ndarray]:
        """The images of each of some samples, uint8 [n, height, width, 3]."""
        return self._of_parts(indices, lambda part, places: part.images(places))

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        return np.stack(self._of_parts(indices, lambda part, places: part.take(places)))

    def _of_parts(self, indices: Sequence[int], read: Callable[[Any, list[int]], Iterable[Any]]) -> list[Any]:
        """What ``read`` returns of each sample, from the part that it belongs to and its place there."""
        located = [self.order[index] for index in indices]
        rows = {
            source: iter(read(self.parts[source], [place for of, place in located if of == source]))
            for source in {source for source, _ in located}
        }
        return [next(rows[source]) for source, _ in located]

    def spans(self, index: int) -> list[Span]:
        """The parts of documents that make up the ``index``-th sample of pretraining."""
        source, place = self.order[index]
        part = self.parts[source]
        assert isinstance(part, PretrainingSamples)
        return part.spans(place)


class Samples(Protocol):
    """The samples of a split, in the order of training."""

    def __len__(self) -> int:
        """Samples that can be taken."""

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, int64 [n, ...]. Raises DataError if they cannot be read."""


ImageSamples: TypeAlias = ImageDataset | BlendedDataset


@dataclass(frozen=True)
class Datasets:
    """The data sets of a run; None for a split that is not read."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


def split_samples(train: TrainConfig, skipped: Sequence[range] = ()) -> dict[str, int]:
    """How many samples of each split a run reads at most, in the order of ``SPLITS``.

    Training has ``train_iters`` global batches besides the samples that are ``skipped``; validation ``eval_iters`` for
    each evaluation (every ``eval_interval`` iterations, and one at the end), the test ``eval_iters``.
    """
    evaluations, of_evaluation = (
        train.train_iters // train.eval_interval + 1,
        train.eval_iters * train.global_batch_size,
    )
    return {
        "train": train.consumed_samples(train.train_iters) + sum(map(len, skipped)),
        "valid": evaluations * of_evaluation,
        "test": of_evaluation,
    }


def samples_per_epoch(data: DataConfig) -> int:
    """Samples of an epoch of the training data set. Raises as ``find_sources``, and ConfigError for a blend."""
    kind = ImageDataset if data.image_format else SFTDataset
    sources = find_sources(data, {"train": 1}, check=kind.problem)["train"]
    if len(sources) > 1:
        raise ConfigError("--epochs is for one data set, and --data-path names a blend: give --train-iters")
    return kind(data, "train", sources[0], 1, vocab_size=0, seed=0).samples_per_epoch


def build_datasets(
    data: DataConfig, samples: Mapping[str, int], *, vocab_size: int, seed: int, masked_lm: bool = False
) -> Datasets:
    """Open the data sets and build ``samples`` of each split, or read them from the cache.

    A split without samples, or whose weight is 0, is None. Any number of processes may call this at once. Raises as
    ``find_sources``.
    """
    datasets: dict[str, Samples | None] = dict.fromkeys(SPLITS)
    if data.mock_data:
        for name, count in samples.items():
            if count and has_split(data, name):
                datasets[name] = mock_samples(data, name, count, seed=seed, masked_lm=masked_lm)
        return Datasets(**datasets)
    kind = _kind(data, masked_lm)
    for name, parts in find_sources(data, samples, check=kind.problem).items():
        of_source = partial(kind, data, name, vocab_size=vocab_size, seed=seed)
        datasets[name] = _blended(data, parts, samples[name], of_source)
    return Datasets(**datasets)


def _blended(
    data: DataConfig,
    sources: Sequence[Source],
    samples: int,
    of_source: Callable[[Source, int], IndexedSamples],
) -> Samples:
    """``samples`` of a split, from all its sources."""
    # A data set has its share of the samples, plus less than one.
    parts = [of_source(source, math.ceil(source.share * samples)) for source in sources]
    if len(sources) == 1:
        parts[0].prepare()
        return parts[0]
    folder = cache_folder(data, sources[0].indexed.prefix)

    def load(window: BlendWindow) -> Mapping[str, np.ndarray]:
        end = window.first + window.length
        forms = {
            "sources": Form(np.uint16, (window.length,), len(sources)),
            "places": Form(np.uint32 if end < 1 << 32 else np.int64, (window.length,), end),
        }

        def fits(arrays: Mapping[str, np.ndarray]) -> bool:
            return np.array_equal(arrays["places"], window.places(arrays["sources"]))

        recipe = Recipe(forms, 6 * window.length, lambda _: window.build(), fits)
        return cached(folder, f"blend_{window.length}ns_{digest((window.shares, window.first))}", recipe)

    order = BlendOrder(tuple(source.share for source in sources), samples, load)
    stored = folder / f"blend_{digest([part.stored_as for part in parts])}_stored"
    if not stored.exists() and all([parts[number].prepare() for number in from_anywhere(range(len(parts)))]):
        with contextlib.suppress(OSError):
            stored.touch()  # others need not look for the maps of each
    return BlendedDataset(parts, order, samples)


def rank_sample_indices(first: int, global_batch_size: int, data_rank: int, data_size: int) -> range:
    """The share of data-parallel rank ``data_rank`` of ``data_size`` in the global batch that begins at ``first``."""
    share = global_batch_size // data_size
    return range(first + data_rank * share, first + (data_rank + 1) * share)


def sample_at(index: int, skipped: Sequence[range]) -> int:
    """The ``index``-th sample, from 0, of those that are not ``skipped``; the ranges are in order."""
    for samples in skipped:
        if samples.start > index:
            break
        index += len(samples)
    return index


def with_skipped(skipped: Sequence[range], samples: range) -> tuple[range, ...]:
    """``skipped`` and ``samples``, in order and without overlap. ``samples`` covers whole ranges or none of them."""
    others = [other for other in skipped if other.start not in samples]
    return tuple(sorted([*others, samples], key=lambda span: span.start))
