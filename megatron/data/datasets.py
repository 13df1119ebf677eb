"""The data sets of a run: the samples of each split, from one data set or a blend of several."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.bert_dataset import BertDataset, bert_error, bert_samples
from megatron.data.gpt2_dataset import GPT2Dataset, gpt2_error, gpt2_samples
from megatron.data.indexed_dataset import Span
from megatron.data.map_cache import cache_folder, cached, digest
from megatron.data.mock_dataset import mock_samples
from megatron.data.pair_dataset import PairDataset, pair_error, pair_samples
from megatron.data.sft_dataset import SFTDataset, sft_error, sft_samples
from megatron.data.splits import Source, find_sources, has_split, split_weights
from megatron.data.t5_dataset import T5Dataset, t5_error, t5_samples

PretrainingSamples: TypeAlias = GPT2Dataset | BertDataset | T5Dataset
IndexedSamples: TypeAlias = PretrainingSamples | SFTDataset | PairDataset


def _readers(
    data: DataConfig, masked_lm: bool
) -> tuple[Callable[[DataConfig, str, Source], str | None], Callable[..., IndexedSamples]]:
    """What checks a source, and what makes samples of it: of masked language models pairs of sentences, or a text with
    spans taken out if a decoder reads those."""
    if data.decoder_seq_length:
        return (pair_error, pair_samples) if data.sft else (t5_error, t5_samples)
    if masked_lm:
        return bert_error, bert_samples
    return (sft_error, sft_samples) if data.sft else (gpt2_error, gpt2_samples)


def check_data(data: DataConfig, *, train_iters: int, eval_iters: int, masked_lm: bool = False) -> None:
    """Check the data sets as far as their indexes show errors; nothing is built. Raises as ``find_sources``."""
    if data.mock_data:
        split_weights(data.split)
        return
    find_sources(data, check=_readers(data, masked_lm)[0], train_iters=train_iters, eval_iters=eval_iters)


BLEND_WINDOW = 1 << 20
"""Samples of a blend whose order is computed at a time."""


@dataclass(frozen=True)
class BlendPlan:
    """Shares and length of a blend, from which its order is computed, or a window of it."""

    shares: tuple[Fraction, ...]
    """Share of each data set; they add up to 1."""
    requested: int
    """Samples needed, counted from the first of the blend."""
    taken: tuple[int, ...] = ()
    """Samples of each data set before the window; empty if it is the first one."""
    names: ClassVar[tuple[str, ...]] = ("sources", "places")
    """Names of the arrays that ``build`` returns."""

    @cached_property
    def period(self) -> int:
        """Samples after which the order repeats: each data set has had exactly its share by then."""
        return math.lcm(*(share.denominator for share in self.shares))

    @property
    def length(self) -> int:
        """Samples whose order has to be computed."""
        return min(self.period, self.requested) - sum(self.taken)

    def window(self, taken: tuple[int, ...]) -> "BlendPlan":
        """The window that begins after so many samples of each data set."""
        return replace(self, requested=min(self.period, self.requested, sum(taken) + BLEND_WINDOW), taken=taken)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that ``build`` returns."""
        return 6 * self.length

    def build(self) -> dict[str, np.ndarray]:
        """``sources`` and ``places`` of the window, [length]: the data set of each sample, and how many before it are
        of the same one."""
        taken = self.taken or (0,) * len(self.shares)
        sources = np.fromiter(_draw(self.shares, taken, self.length), np.uint16, self.length)
        places = np.empty(self.length, np.uint32 if self.length + sum(taken) < 1 << 32 else np.int64)
        for source, before in enumerate(taken):
            is_its_own = sources == source
            places[is_its_own] = np.arange(before, before + np.count_nonzero(is_its_own), dtype=places.dtype)
        return {"sources": sources, "places": places}

    def fits(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether ``arrays`` have the shapes of those that ``build`` returns."""
        return all(arrays[name].shape == (self.length,) for name in self.names)


class BlendOrder:
    """The data set of each sample of a blend: the shares hold exactly, at every point of the stream.

    Of the first n samples a data set with the share w has w * n, plus or minus less than one. That is Tijdeman's
    solution of the chairman assignment problem: each sample of a data set has a first and a last position, and of the
    samples that may take a position, the one whose last position comes first does. Nothing depends on how many samples
    are requested. The order is computed for a window of samples at a time; what precedes a window is needed for it.

    Args:
        sources, places: arrays of the first window, see ``BlendPlan.build``.
        load: returns the arrays of a later window.
    """

    def __init__(
        self,
        plan: BlendPlan,
        sources: np.ndarray,
        places: np.ndarray,
        load: Callable[[BlendPlan], Mapping[str, np.ndarray]] = BlendPlan.build,
    ) -> None:
        self._plan, self._load = plan, load
        self._in_period = [int(share * plan.period) for share in plan.shares]
        self._before: list[tuple[int, ...]] = [(0,) * len(plan.shares)]
        self._first = {"sources": sources, "places": places}
        self._window = lru_cache(maxsize=2)(self._open_window)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The data set of the ``index``-th sample, and its index among the samples of that data set."""
        periods, position = divmod(index, self._plan.period)
        number, at = divmod(position, BLEND_WINDOW)
        window = self._window(number)
        source = window["sources"].item(at)
        return source, periods * self._in_period[source] + window["places"].item(at)

    def sources(self, samples: int) -> np.ndarray:
        """The data set of each of the first ``samples``, [samples]."""
        needed = min(samples, self._plan.period)
        windows = [self._window(number)["sources"] for number in range(-(-needed // BLEND_WINDOW))]
        return np.resize(np.concatenate([np.empty(0, np.uint16), *windows]), samples)

    def counts(self, samples: int) -> list[int]:
        """Number of samples of each data set among the first ``samples``."""
        periods, rest = divmod(samples, self._plan.period)
        number, at = divmod(rest, BLEND_WINDOW)
        before = self._taken_before(number)
        last = _counts(self._window(number)["sources"][:at], before) if at else before
        return [periods * whole + part for whole, part in zip(self._in_period, last, strict=True)]

    def _open_window(self, number: int) -> Mapping[str, np.ndarray]:
        taken = self._taken_before(number)
        return self._load(self._plan.window(taken)) if number else self._first

    def _taken_before(self, number: int) -> tuple[int, ...]:
        """Samples of each data set before the ``number``-th window."""
        while len(self._before) <= number:
            latest = len(self._before) - 1
            self._before.append(_counts(self._window(latest)["sources"], self._before[latest]))
        return self._before[number]


def _counts(sources: np.ndarray, before: tuple[int, ...]) -> tuple[int, ...]:
    """Samples of each data set among ``sources`` and those ``before`` them."""
    counts = np.bincount(sources, minlength=len(before)).tolist()
    return tuple(earlier + count for earlier, count in zip(before, counts, strict=True))


def _draw(shares: Sequence[Fraction], taken: Sequence[int], length: int) -> Iterator[int]:
    """The data set of each of ``length`` samples, after so many of each data set have been ``taken``."""
    if len(shares) == 1:
        yield from itertools.repeat(0, length)
        return
    # Sample t of a data set with the share w may be the n-th of all if t + 1 / m <= w * n, and must be by then
    # if w * n > t + 1 - 1 / m: computed in whole numbers, which are exact, and fast.
    m = 2 * len(shares) - 2
    ratios = [(m * share.numerator, share.denominator) for share in shares]
    waiting = [
        (-(-((count * m + 1) * whole) // part), source, count)
        for source, (count, (part, whole)) in enumerate(zip(taken, ratios, strict=True))
    ]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    first = sum(taken) + 1
    for position in range(first, first + length):
        while waiting and waiting[0][0] <= position:
            _, source, count = heapq.heappop(waiting)
            part, whole = ratios[source]
            heapq.heappush(ready, (-(-((count * m + m - 1) * whole) // part), source, count))
        _, source, count = heapq.heappop(ready)
        yield source
        part, whole = ratios[source]
        heapq.heappush(waiting, (-(-((count * m + m + 1) * whole) // part), source, count + 1))


class BlendedDataset:
    """``samples`` samples of the data sets ``parts``, in the ``order`` of training."""

    def __init__(self, parts: Sequence[IndexedSamples], order: BlendOrder, samples: int) -> None:
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
    check, samples_of = _readers(data, masked_lm)
    sources = find_sources(data, check=check, train_iters=train_iters, eval_iters=eval_iters, warmup=data.mmap_warmup)
    for name, parts in sources.items():
        of_source = partial(samples_of, data, name, vocab_size=vocab_size, seed=seed)
        datasets[name] = _blended(data, parts, samples[name], of_source)
    return Datasets(**datasets)


def _blended(
    data: DataConfig,
    sources: Sequence[Source],
    samples: int,
    of_source: Callable[[Source, int], IndexedSamples],
) -> Samples:
    """``samples`` of a split, from all its sources."""
    if len(sources) == 1:
        return of_source(sources[0], samples)
    plan = BlendPlan(tuple(source.share for source in sources), samples)
    folder = cache_folder(data, sources[0].indexed.prefix)

    def load(window: BlendPlan) -> Mapping[str, np.ndarray]:
        origin: object = (plan.shares, sum(window.taken)) if any(window.taken) else plan.shares
        return cached(folder, f"blend_{window.length}ns_{digest(origin)}", window)

    first = load(plan.window(()))
    order = BlendOrder(plan, first["sources"], first["places"], load)
    # A data set has its share of the samples, plus less than one.
    parts = [of_source(source, math.ceil(source.share * samples)) for source in sources]
    return BlendedDataset(parts, order, samples)
