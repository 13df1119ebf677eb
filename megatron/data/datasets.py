"""The data sets of a run: the samples of each split, out of one data set or a blend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from megatron.config import DataConfig
from megatron.config.architecture import BERT, GPT2
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import BertDataset, bert_fault, bert_samples
from megatron.data.blend import BlendOrder, BlendPlan
from megatron.data.gpt2_dataset import GPT2Dataset, Span, gpt2_fault, gpt2_samples
from megatron.data.map_cache import cache_folder, cached_order, digest
from megatron.data.sources import Source, find_sources


class BlendedDataset:
    """Samples of a blend, in the order of training.

    Args:
        parts: the data sets.
        order: where each sample is found in them.
        samples: how many there are.
    """

    def __init__(self, parts: Sequence[GPT2Dataset | BertDataset], order: BlendOrder, samples: int) -> None:
        self.parts, self.order = parts, order
        self._samples = samples

    def __len__(self) -> int:
        """Samples in the blend, as many as were asked for."""
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        """The ``index``-th sample to train on, as its part gives it. Raises DataError as its part does."""
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, [n, ...]. Raises DataError as their parts do."""
        if wrong := [index for index in indices if not 0 <= index < self._samples]:
            raise IndexError(wrong[0])
        found = [self.order[index] for index in indices]
        rows = {
            source: iter(self.parts[source].take([place for of, place in found if of == source]))
            for source in {source for source, _ in found}
        }
        return np.stack([next(rows[source]) for source, _ in found])

    def spans(self, index: int) -> list[Span]:
        """The pieces of documents that make the ``index``-th sample."""
        source, place = self.order[index]
        return self.parts[source].spans(place)


Samples = GPT2Dataset | BertDataset | BlendedDataset


class Reader(NamedTuple):
    """What makes samples of a data set."""

    fault: Callable[[DataConfig, str, Source], str | None]
    """A message for a source of a split that holds not a single sample."""
    samples: Callable[..., GPT2Dataset | BertDataset]
    """Of (data, name of the split, source, how many at the least), with vocab_size and seed."""


READERS = {GPT2.name: Reader(gpt2_fault, gpt2_samples), BERT.name: Reader(bert_fault, bert_samples)}
"""That of each model."""


@dataclass(frozen=True)
class Datasets:
    """What a run reads. A data set is None where nothing is to be read from it."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


def check_data(data: DataConfig, *, train_iters: int, eval_iters: int, architecture: str = GPT2.name) -> None:
    """Look for the faults of the data sets that their indexes show, without building anything.

    Raises:
        ConfigError: no data path, or a ``--split`` that cannot be read.
        DataError: files that are missing or damaged, or a split in use without a single sample.
    """
    find_sources(data, fault=READERS[architecture].fault, train_iters=train_iters, eval_iters=eval_iters)


def build_datasets(
    data: DataConfig,
    *,
    vocab_size: int,
    global_batch_size: int,
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    seed: int,
    architecture: str = GPT2.name,
) -> Datasets:
    """Open the data sets and build, or read from the cache, the samples that a model takes of their splits.

    Training has ``train_iters`` global batches, validation ``eval_iters`` for each evaluation (every
    ``eval_interval`` iterations, and one at the end), the test ``eval_iters``. A split whose count or
    weight is 0 is None. Any number of processes may call this at once.

    Raises:
        ConfigError, DataError: as ``check_data``.
    """
    batches = {
        "train": train_iters,
        "valid": (train_iters // eval_interval + 1) * eval_iters,
        "test": eval_iters,
    }
    datasets: dict[str, Samples | None] = dict.fromkeys(SPLITS)
    fault, samples = READERS[architecture]
    wanted = {"train_iters": train_iters, "eval_iters": eval_iters}
    for name, sources in find_sources(data, fault=fault, **wanted, warmup=data.mmap_warmup).items():
        of_source = partial(samples, data, name, vocab_size=vocab_size, seed=seed)
        datasets[name] = _blended(data, sources, batches[name] * global_batch_size, of_source)
    return Datasets(**datasets)


def _blended(
    data: DataConfig, sources: Sequence[Source], samples: int, of_source: Callable[[Source, int], Samples]
) -> Samples:
    """``samples`` of a split, out of all its sources."""
    if len(sources) == 1:
        return of_source(sources[0], samples)
    plan = BlendPlan(tuple(source.share for source in sources), samples)
    folder = cache_folder(data, sources[0].indexed.prefix)
    order = cached_order(folder, f"blend_{plan.length}ns_{digest(plan.shares)}", plan)
    parts = [of_source(source, count) for source, count in zip(sources, order.counts(samples), strict=True)]
    return BlendedDataset(parts, order, samples)
