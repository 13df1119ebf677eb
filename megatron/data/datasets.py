"""The data sets of a run: the samples of each split, from one data set or a blend of several."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import ClassVar, Protocol

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import BertDataset, bert_error, bert_samples
from megatron.data.gpt2_dataset import GPT2Dataset, Span, gpt2_error, gpt2_samples
from megatron.data.map_cache import cache_folder, cached, digest
from megatron.data.mock_dataset import mock_samples
from megatron.data.splits import Source, find_sources, has_split, split_weights

_CHECKS = {False: gpt2_error, True: bert_error}
_SAMPLES: dict[bool, Callable[..., GPT2Dataset | BertDataset]] = {False: gpt2_samples, True: bert_samples}
"""By ``masked_lm``: of causal language models, and of masked ones, whose samples are pairs of sentences."""


def check_data(data: DataConfig, *, train_iters: int, eval_iters: int, masked_lm: bool = False) -> None:
    """Check the data sets as far as their indexes show errors; nothing is built. Raises as ``find_sources``."""
    if data.mock_data:
        split_weights(data.split)
        return
    find_sources(data, check=_CHECKS[masked_lm], train_iters=train_iters, eval_iters=eval_iters)


@dataclass(frozen=True)
class BlendPlan:
    """Shares and length of a blend, from which its order is computed."""

    shares: tuple[Fraction, ...]
    """Share of each data set; they add up to 1."""
    requested: int
    """Samples needed."""
    names: ClassVar[tuple[str, ...]] = ("sources", "places")
    """Names of the arrays that ``build`` returns."""

    @cached_property
    def period(self) -> int:
        """Samples after which the order repeats: each data set has had exactly its share by then."""
        return math.lcm(*(share.denominator for share in self.shares))

    @property
    def length(self) -> int:
        """Samples whose order has to be computed."""
        return min(self.period, self.requested)

    def build(self) -> dict[str, np.ndarray]:
        """``sources`` and ``places`` of a ``BlendOrder``."""
        sources = np.fromiter(_draw(self.shares, self.length), np.uint16, self.length)
        places = np.empty(self.length, np.uint32 if self.length < 1 << 32 else np.int64)
        for source in range(len(self.shares)):
            is_its_own = sources == source
            places[is_its_own] = np.arange(np.count_nonzero(is_its_own), dtype=places.dtype)
        return {"sources": sources, "places": places}

    def fits(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether ``arrays`` have the shapes of those that ``build`` returns."""
        return all(arrays[name].shape == (self.length,) for name in self.names)


class BlendOrder:
    """The data set of each sample of a blend: the shares hold exactly, at every point of the stream.

    Of the first n samples a data set with the share w has w * n, plus or minus less than one. That is Tijdeman's
    solution of the chairman assignment problem: each sample of a data set has a first and a last position, and of the
    samples that may take a position, the one whose last position comes first does. Nothing depends on how many samples
    are requested.

    Args:
        sources: the data set of each of the first samples, [length].
        places: how many samples before it are of the same data set, [length].
    """

    def __init__(self, plan: BlendPlan, sources: np.ndarray, places: np.ndarray) -> None:
        self._plan, self._sources, self._places = plan, sources, places
        self._in_period = [int(share * plan.period) for share in plan.shares]

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The data set of the ``index``-th sample, and its index among the samples of that data set."""
        periods, position = divmod(index, self._plan.period)
        source = self._sources.item(position)
        return source, periods * self._in_period[source] + self._places.item(position)

    def sources(self, samples: int) -> np.ndarray:
        """The data set of each of the first ``samples``, [samples]."""
        return np.resize(self._sources, samples)

    def counts(self, samples: int) -> list[int]:
        """Number of samples of each data set among the first ``samples``."""
        periods, rest = divmod(samples, self._plan.period)
        last = np.bincount(self._sources[:rest], minlength=len(self._in_period))
        return [periods * whole + int(part) for whole, part in zip(self._in_period, last, strict=True)]


def _draw(shares: Sequence[Fraction], length: int) -> Iterator[int]:
    """The data set of each of the first ``length`` samples."""
    if len(shares) == 1:
        yield from itertools.repeat(0, length)
        return
    # Sample t of a data set with the share w may be the n-th of all if t + 1 / m <= w * n, and must be by then
    # if w * n > t + 1 - 1 / m: computed in whole numbers, which are exact, and fast.
    m = 2 * len(shares) - 2
    ratios = [(m * share.numerator, share.denominator) for share in shares]
    waiting = [(-(-whole // part), source, 0) for source, (part, whole) in enumerate(ratios)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for position in range(1, length + 1):
        while waiting and waiting[0][0] <= position:
            _, source, taken = heapq.heappop(waiting)
            part, whole = ratios[source]
            heapq.heappush(ready, (-(-((taken * m + m - 1) * whole) // part), source, taken))
        _, source, taken = heapq.heappop(ready)
        yield source
        part, whole = ratios[source]
        heapq.heappush(waiting, (-(-((taken * m + m + 1) * whole) // part), source, taken + 1))


class BlendedDataset:
    """``samples`` samples of the data sets ``parts``, in the ``order`` of training."""

    def __init__(self, parts: Sequence[GPT2Dataset | BertDataset], order: BlendOrder, samples: int) -> None:
        self.parts, self.order = parts, order
        self._samples = samples

    def __len__(self) -> int:
        """Samples in the blend, as many as were requested."""
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        """The ``index``-th sample to train on, as its data set returns it. Raises DataError as that does."""
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, [n, ...]. Raises DataError as their data sets do."""
        if wrong := [index for index in indices if not 0 <= index < self._samples]:
            raise IndexError(wrong[0])
        located = [self.order[index] for index in indices]
        rows = {
            source: iter(self.parts[source].take([place for of, place in located if of == source]))
            for source in {source for source, _ in located}
        }
        return np.stack([next(rows[source]) for source, _ in located])

    def spans(self, index: int) -> list[Span]:
        """The parts of documents that make up the ``index``-th sample, which is one of GPT-2."""
        source, place = self.order[index]
        part = self.parts[source]
        assert isinstance(part, GPT2Dataset)
        return part.spans(place)


class Samples(Protocol):
    """The samples of a split, in the order of training."""

    def __len__(self) -> int:
        """Samples that can be taken."""

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, int64 [n, ...]. Raises DataError if they cannot be read."""


@dataclass(frozen=True)
class Datasets:
    """The data sets of a run; None for a split that is not read."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


def split_samples(
    *, global_batch_size: int, train_iters: int, eval_interval: int, eval_iters: int, train_samples: int | None = None
) -> dict[str, int]:
    """How many samples of each split a run reads at most, in the order of ``SPLITS``; see ``build_datasets``."""
    evaluations = train_iters // eval_interval + 1
    return {
        "train": train_iters * global_batch_size if train_samples is None else train_samples,
        "valid": evaluations * eval_iters * global_batch_size,
        "test": eval_iters * global_batch_size,
    }


def build_datasets(
    data: DataConfig,
    *,
    vocab_size: int,
    global_batch_size: int,
    train_iters: int,
    eval_interval: int,
    eval_iters: int,
    seed: int,
    masked_lm: bool = False,
    train_samples: int | None = None,
) -> Datasets:
    """Open the data sets and build the samples of their splits, or read them from the cache.

    Training has ``train_iters`` global batches, or ``train_samples`` if they are not all of one size; validation
    ``eval_iters`` for each evaluation (every ``eval_interval`` iterations, and one at the end), the test
    ``eval_iters``. A split whose count or weight is 0 is None. Any number of processes may call this at once. Raises
    as ``find_sources``.
    """
    samples = split_samples(
        global_batch_size=global_batch_size,
        train_iters=train_iters,
        eval_interval=eval_interval,
        eval_iters=eval_iters,
        train_samples=train_samples,
    )
    datasets: dict[str, Samples | None] = dict.fromkeys(SPLITS)
    if data.mock_data:
        for name in SPLITS:
            if samples[name] and has_split(data, name):
                datasets[name] = mock_samples(data, name, samples[name], seed=seed, masked_lm=masked_lm)
        return Datasets(**datasets)
    check = _CHECKS[masked_lm]
    sources = find_sources(data, check=check, train_iters=train_iters, eval_iters=eval_iters, warmup=data.mmap_warmup)
    for name, parts in sources.items():
        of_source = partial(_SAMPLES[masked_lm], data, name, vocab_size=vocab_size, seed=seed)
        datasets[name] = _blended(data, parts, samples[name], of_source)
    return Datasets(**datasets)


def _blended(
    data: DataConfig,
    sources: Sequence[Source],
    samples: int,
    of_source: Callable[[Source, int], GPT2Dataset | BertDataset],
) -> Samples:
    """``samples`` of a split, from all its sources."""
    if len(sources) == 1:
        return of_source(sources[0], samples)
    plan = BlendPlan(tuple(source.share for source in sources), samples)
    folder = cache_folder(data, sources[0].indexed.prefix)
    order = BlendOrder(plan, **cached(folder, f"blend_{plan.length}ns_{digest(plan.shares)}", plan))
    return BlendedDataset(list(map(of_source, sources, order.counts(samples))), order, samples)
