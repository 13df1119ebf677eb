"""The data sets of a run: the samples of each split, out of one data set or a blend."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.config import DataConfig
from megatron.config.files import SPLITS
from megatron.data.blend import BlendPlan
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.index_maps import SampleStream
from megatron.data.map_cache import cached_maps, cached_order
from megatron.data.sources import Source, find_sources

Samples = GPT2Dataset | BlendedDataset


@dataclass(frozen=True)
class Datasets:
    """What a run reads. A data set is None where nothing is to be read from it."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


def check_data(data: DataConfig, *, train_iters: int, eval_iters: int) -> None:
    """Look for the faults of the data sets that their indexes show, without building anything.

    Raises:
        ConfigError: no data path, or a ``--split`` that cannot be read.
        DataError: files that are missing or damaged, or a split in use without a single sample.
    """
    find_sources(data, train_iters=train_iters, eval_iters=eval_iters)


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
    """Open the data sets and build, or read from the cache, the samples of their splits.

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
    found = find_sources(data, train_iters=train_iters, eval_iters=eval_iters, warmup=data.mmap_warmup)
    for name, sources in found.items():
        samples = batches[name] * global_batch_size
        datasets[name] = _blended(data, name, sources, samples, vocab_size=vocab_size, seed=seed)
    return Datasets(**datasets)


def _blended(
    data: DataConfig, name: str, sources: Sequence[Source], samples: int, *, vocab_size: int, seed: int
) -> Samples:
    """The samples of a split, out of all its sources."""
    if len(sources) == 1:
        return _samples(data, name, sources[0], samples, vocab_size=vocab_size, seed=seed)
    plan = BlendPlan(tuple(source.share for source in sources), samples)
    folder = _cache_folder(data, sources[0])
    order = cached_order(folder, f"blend_{plan.length}ns_{_digest(plan.shares)}", plan)
    parts = [
        _samples(data, name, source, count, vocab_size=vocab_size, seed=seed)
        for source, count in zip(sources, order.counts(samples), strict=True)
    ]
    return BlendedDataset(parts, order, samples)


def _samples(data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int) -> GPT2Dataset:
    """The samples of one source, ``samples`` at the least."""
    indexed, documents = source.indexed, source.documents
    stream = SampleStream(
        lengths=np.diff(indexed.document_starts[documents.start : documents.stop + 1]),
        seq_length=data.seq_length,
        wanted=samples,
        seed=seed,
        salt=SPLITS.index(name),
    )
    maps = cached_maps(_cache_folder(data, source), _cache_name(source, name, stream), stream)
    return GPT2Dataset(indexed, documents, maps, vocab_size=vocab_size)


def _cache_folder(data: DataConfig, source: Source) -> Path:
    """Where index maps are kept: ``--data-cache-path``, or beside the data."""
    return Path(data.data_cache_path or Path(source.indexed.prefix).parent / "index-cache")


def _cache_name(source: Source, name: str, stream: SampleStream) -> str:
    """A name for a stream's maps: readable, and with a hash of whatever they depend on."""
    origin = (source.indexed.content_hash(), source.documents, name, stream.seed, stream.seq_length, stream.samples)
    prefix = Path(source.indexed.prefix).name
    return f"{prefix}_{name}_{stream.samples}ns_{stream.seq_length}sl_{stream.seed}s_{_digest(origin)}"


def _digest(origin: object) -> str:
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
