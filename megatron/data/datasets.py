"""Builds the data sets of a run: samples for training, validation and test, from one data set or a blend."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron.common.errors import ConfigError, DataError
from megatron.config import DataConfig, TrainConfig
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import BertDataset
from megatron.data.blend_order import BlendOrder, BlendWindow
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.image_dataset import ImageDataset
from megatron.data.indexed_dataset import Span
from megatron.data.map_cache import Form, Recipe, cache_folder, cached, digest, from_random_start
from megatron.data.mock_dataset import mock_samples
from megatron.data.sft_dataset import SFTDataset
from megatron.data.splits import Samples, Source, find_sources, has_split, split_weights
from megatron.data.t5_dataset import PairDataset, T5Dataset, span_problem

PretrainingSamples: TypeAlias = GPT2Dataset | BertDataset | T5Dataset
IndexedSamples: TypeAlias = PretrainingSamples | SFTDataset | PairDataset


def _samples_class(data: DataConfig, masked_lm: bool) -> type[IndexedSamples]:
    """The class of the samples of a run: for T5 if there is a decoder, for BERT if ``masked_lm``, or for LLaVA, SFT
    or GPT-2."""
    if data.decoder_seq_length:
        return PairDataset if data.sft else T5Dataset
    if masked_lm:
        return BertDataset
    if data.image_format:
        return ImageDataset
    return SFTDataset if data.sft else GPT2Dataset


def check_data(data: DataConfig, samples: Mapping[str, int], *, masked_lm: bool = False) -> list[str]:
    """Check the indexes of the data sets of all splits with ``samples``; nothing is built.

    Returns a message for each data set with an empty test split, which is not evaluated. Raises as ``find_sources``.
    """
    if data.mock_data:
        split_weights(data.split)
        if masked_lm and data.decoder_seq_length and (problem := span_problem(data)):
            raise DataError(problem)
        return []
    skipped: list[str] = []
    find_sources(data, samples, check=_samples_class(data, masked_lm).problem, skipped=skipped)
    return [f"there is no evaluation on the test split: {message}" for message in skipped]


class BlendedDataset(Samples):
    """A blend: ``samples`` samples of the data sets ``parts``, in the ``order`` of training."""

    def __init__(self, parts: Sequence[IndexedSamples], order: BlendOrder, samples: int, folder: Path) -> None:
        super().__init__(samples)
        self.parts, self.order, self.map_files = parts, order, f"{folder}/blend_*"

    def count_images(self, indices: Sequence[int]) -> np.ndarray:
        """The number of images of each sample in ``indices``, int64 [n]."""
        return np.array(self._read_parts(indices, lambda part, places: part.count_images(places)), np.int64)

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples in an epoch of each part."""
        return sum(part.samples_per_epoch for part in self.parts if isinstance(part, ImageDataset))

    def most_images(self, samples: int) -> np.ndarray:
        """The most images that consecutive ``samples`` can have, in descending order, int64 [samples]."""
        of_parts = [part.most_images(samples) for part in self.parts if isinstance(part, ImageDataset)]
        return np.sort(np.concatenate(of_parts))[::-1][:samples]

    def images(self, indices: Sequence[int]) -> list[np.ndarray]:
        """The images of each sample in ``indices``, uint8 [n, height, width, 3]."""
        return self._read_parts(indices, lambda part, places: part.images(places))

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        return np.stack(self._read_parts(indices, lambda part, places: part.take(places)))

    def _read_parts(self, indices: Sequence[int], read: Callable[[Any, list[int]], Iterable[Any]]) -> list[Any]:
        """Call ``read(part, places)`` for each part, and return its results in the order of ``indices``."""
        with self.reading_maps():
            located = [self.order[index] for index in indices]
            parts = {source: self.parts[source] for source, _ in located}
        rows = {
            source: iter(read(part, [place for other, place in located if other == source]))
            for source, part in parts.items()
        }
        return [next(rows[source]) for source, _ in located]

    def spans(self, index: int) -> list[Span]:
        """The parts of documents in sample ``index`` of a pretraining data set."""
        source, place = self.order[index]
        part = self.parts[source]
        assert isinstance(part, PretrainingSamples)
        return part.spans(place)


ImageSamples: TypeAlias = ImageDataset | BlendedDataset


@dataclass(frozen=True)
class Datasets:
    """The data sets of a run; None for a split that is not read."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


def split_samples(train: TrainConfig, skipped: Sequence[range] = ()) -> dict[str, int]:
    """The maximum number of samples that a run reads of each split, in the order of ``SPLITS``.

    Training reads ``train_iters`` global batches, and skips the samples ``skipped``; validation reads ``eval_iters``
    batches every ``eval_interval`` iterations and at the end; the test reads ``eval_iters`` batches once.
    """
    evaluations = train.train_iters // train.eval_interval + 1
    evaluation_samples = train.eval_iters * train.global_batch_size
    return {
        "train": train.consumed_samples(train.train_iters) + sum(map(len, skipped)),
        "valid": evaluations * evaluation_samples,
        "test": evaluation_samples,
    }


def samples_per_epoch(data: DataConfig) -> int:
    """Number of samples in an epoch of training data. Raises as ``find_sources``, and ConfigError for a blend."""
    kind = ImageDataset if data.image_format else SFTDataset
    sources = find_sources(data, {"train": 1}, check=kind.problem)["train"]
    if len(sources) > 1:
        raise ConfigError("--epochs is for one data set, and --data-path names a blend: give --train-iters")
    return kind(data, "train", sources[0], 1, vocab_size=0, seed=0).samples_per_epoch


def build_datasets(
    data: DataConfig, samples: Mapping[str, int], *, vocab_size: int, seed: int, masked_lm: bool = False
) -> Datasets:
    """Open the data sets, and build index maps for ``samples`` of each split or read them from the cache.

    A split without samples, or whose weight is 0, is None. Any number of processes may call this at once. Raises as
    ``find_sources``.
    """
    datasets: dict[str, Samples | None] = dict.fromkeys(SPLITS)
    if data.mock_data:
        for name, count in samples.items():
            if count and has_split(data, name):
                datasets[name] = mock_samples(data, name, count, seed=seed, masked_lm=masked_lm)
        return Datasets(**datasets)
    kind = _samples_class(data, masked_lm)
    for name, parts in find_sources(data, samples, check=kind.problem).items():
        make_samples = partial(kind, data, name, vocab_size=vocab_size, seed=seed)
        datasets[name] = _blended(data, parts, samples[name], make_samples)
    return Datasets(**datasets)


def _blended(
    data: DataConfig,
    sources: Sequence[Source],
    samples: int,
    make_samples: Callable[[Source, int], IndexedSamples],
) -> Samples:
    """``samples`` of a split, from one data set or a blend of all its ``sources``."""
    # A blend reads at most its share of the samples, rounded up, from each data set.
    parts = [make_samples(source, math.ceil(source.share * samples)) for source in sources]
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
    if not stored.exists() and all([parts[number].prepare() for number in from_random_start(range(len(parts)))]):
        with contextlib.suppress(OSError):
            stored.touch()  # other processes then do not check the maps of each data set
    return BlendedDataset(parts, order, samples, folder)


def rank_sample_indices(first: int, global_batch_size: int, data_rank: int, data_size: int) -> range:
    """The samples of data-parallel rank ``data_rank`` of ``data_size`` in the global batch that begins at ``first``."""
    share = global_batch_size // data_size
    return range(first + data_rank * share, first + (data_rank + 1) * share)


def sample_at(index: int, skipped: Sequence[range]) -> int:
    """The number of the ``index``-th sample, from 0, when the ranges ``skipped`` are left out; they are in order."""
    for samples in skipped:
        if samples.start > index:
            break
        index += len(samples)
    return index


def with_skipped(skipped: Sequence[range], samples: range) -> tuple[range, ...]:
    """``skipped`` with ``samples`` added, in order, without the ranges that ``samples`` covers completely."""
    others = [other for other in skipped if other.start not in samples]
    return tuple(sorted([*others, samples], key=lambda span: span.start))
