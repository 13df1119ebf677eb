"""Blends: proportions at every point, the samples of each part in their order, and caches."""

import gc
import json
import os
import random
import resource
import secrets
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from data.conftest import SAMPLES, TEXT_TOKENS, built

from megatron.common.errors import DataError, ResourceError
from megatron.config import DataConfig
from megatron.data import blend_order, fingerprint, index_file, indexed_dataset, map_cache, mapped_file, splits
from megatron.data.blend_order import BlendOrder, BlendWindow, taken_before
from megatron.data.datasets import BlendedDataset, check_data
from megatron.data.index_file import Totals
from megatron.data.indexed_dataset import IndexedDataset, Known


def shares_of(*weights: int | str) -> tuple[Fraction, ...]:
    fractions = [Fraction(weight) for weight in weights]
    return tuple(fraction / sum(fractions) for fraction in fractions)


CHANCE = random.Random(7)
BLENDS = [
    shares_of(1),
    shares_of(1, 1),
    shares_of("0.3", "0.7"),
    shares_of(90, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),  # a greedy order is off by several samples
    shares_of("0.123", "1e-3", 7),
    *(shares_of(*(CHANCE.randint(1, 999) for _ in range(CHANCE.randint(2, 12)))) for _ in range(30)),
]


@pytest.mark.parametrize("shares", BLENDS, ids=[str(number) for number in range(len(BLENDS))])
def test_blend_has_the_weights_at_every_point(shares: tuple[Fraction, ...]) -> None:
    requested = 1000
    order = BlendOrder(shares, requested)
    taken = [0] * len(shares)
    for sample in range(requested):
        source, place = order[sample]
        assert place == taken[source]
        taken[source] += 1
        assert all(abs(count - share * (sample + 1)) < 1 for count, share in zip(taken, shares, strict=True))


@pytest.fixture
def prefixes(write_dataset: Callable[..., str]) -> list[str]:
    """Three data sets, whose tokens encode the data set (ten thousands) and the document (hundreds)."""
    documents = ([[10000 * part + 100 * n + 7] * (5 + n % 11) for n in range(60)] for part in range(3))
    return [write_dataset(texts, name=f"part{part}") for part, texts in enumerate(documents)]


def blend(prefixes: list[str], *weights: str) -> DataConfig:
    words = [word for pair in zip(weights, prefixes, strict=True) for word in pair]
    return DataConfig(data_path=tuple(words), seq_length=16, split="40,10,10")


def test_a_blend_has_the_samples_of_its_parts_in_order(prefixes: list[str]) -> None:
    datasets = built(blend(prefixes, "0.5", "0.3", "0.2"))
    alone = [built(DataConfig(data_path=(prefix,), seq_length=16, split="40,10,10")) for prefix in prefixes]
    for name, samples in (("train", 100), ("valid", 32), ("test", 8)):
        blended = getattr(datasets, name)
        assert isinstance(blended, BlendedDataset) and len(blended) == samples
        found = [blended[sample] for sample in range(samples)]
        assert np.array_equal(blended.take(range(samples)), found)
        for part, share in enumerate((0.5, 0.3, 0.2)):
            own = [sample.tolist() for sample in found if sample[0] // 10000 == part]
            assert abs(len(own) - share * samples) < 1
            assert own == [getattr(alone[part], name)[place].tolist() for place in range(len(own))]


def test_each_split_may_have_its_own(prefixes: list[str]) -> None:
    data = DataConfig(
        train_data_path=("1", prefixes[0], "1", prefixes[1]), valid_data_path=(prefixes[2],), seq_length=16
    )
    datasets = built(data)
    parts = [{int(token) // 10000 for n in range(20) for token in samples[n]} for samples in
             (datasets.train, datasets.valid)]  # fmt: skip
    assert parts == [{0, 1}, {2}] and datasets.test is None
    assert {int(token) // 100 % 100 for n in range(30) for token in datasets.valid[n]} - set(range(10)), "not split"


def test_everything_that_is_missing_or_too_small_is_named(prefixes: list[str], write_dataset: Callable) -> None:
    with pytest.raises(DataError) as caught:
        check_data(blend(["nowhere", prefixes[0], "none"], "1", "1", "1"), SAMPLES)
    assert [message.split(":")[0] for message in caught.value.messages] == [
        "no data set at nowhere",
        "no data set at none",
    ]
    small = write_dataset([[1] * 40, [2], [3]], name="small")
    with pytest.raises(DataError) as caught:
        check_data(blend([prefixes[0], small], "1", "1"), SAMPLES)
    assert [message.split(" (")[0] for message in caught.value.messages] == [
        f'the validation split of {small} by --split "40,10,10"'
    ]
    own = DataConfig(train_data_path=(prefixes[0],), valid_data_path=(small,), seq_length=64)
    with pytest.raises(DataError, match=r"of 3: 42 tokens\) holds no sample of 64\+1 tokens: use a sm"):
        check_data(own, SAMPLES)


def test_processes_that_build_together_begin_at_different_data_sets(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Counted(IndexedDataset):
        def __init__(self, prefix: str, **options: Any) -> None:
            opened.append(prefix)
            super().__init__(prefix, **options)

    monkeypatch.setattr(splits, "IndexedDataset", Counted)
    monkeypatch.setattr(secrets, "randbelow", lambda end: end - 1)
    sources = splits.all_sources(blend(prefixes, "1", "2", "3"))["train"]
    assert opened == [prefixes[2], *prefixes[:2]] and [source.indexed.prefix for source in sources] == prefixes


def test_blends_share_the_caches_of_their_parts(prefixes: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "index-cache"
    built(blend(prefixes, "1", "1", "1"))
    before = {path.name for path in folder.glob("*.npy")}
    assert sum(name.startswith("blend_") for name in before) == 2
    built(blend(prefixes, "2", "2", "2"))
    assert {path.name for path in folder.glob("*.npy")} == before


def equal_blend(write_dataset: Callable[..., str], count: int) -> DataConfig:
    """``count`` data sets of equal weight, whose tokens are their numbers."""
    prefixes = [write_dataset([[part] * (20 + n) for n in range(9)], name=f"of{part}") for part in range(count)]
    return DataConfig(data_path=tuple(word for prefix in prefixes for word in ("1", prefix)), seq_length=16)


def test_a_blend_of_more_data_sets_than_a_process_may_open_files(
    monkeypatch: pytest.MonkeyPatch, write_dataset
) -> None:
    """Each file is mapped when it is read first, and none stays open."""
    monkeypatch.setattr(mapped_file, "READ_AT_ONCE", 0)
    count, before = 40, psutil.Process().num_fds()
    data = equal_blend(write_dataset, count)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + count // 2, hard))
    try:
        for _ in range(2):  # builds, and reads what is built
            samples = built(data, {"train": 100}).train
            assert samples is not None
            assert {samples.take([number])[0, 0].item() for number in range(count)} == set(range(count))
            assert psutil.Process().num_fds() <= before + 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    maps = Path("/proc/self/maps").read_text
    assert data.prefixes[0] in maps()
    del samples
    gc.collect()
    assert data.prefixes[0] not in maps(), "the mappings end with the data sets"


def test_a_blend_of_more_data_sets_than_a_process_may_map(monkeypatch: pytest.MonkeyPatch, write_dataset) -> None:
    """Maps that are not in use are closed where there is no room for others."""
    count, most, alive = 12, 2 * 12 + 9, set[int]()

    class Limited(mapped_file._Mapping):
        def __init__(self, *args: Any) -> None:
            if len(alive) >= most:
                raise ResourceError("too many")
            super().__init__(*args)
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))
            super().__del__()

    monkeypatch.setattr(mapped_file, "READ_AT_ONCE", 0)
    monkeypatch.setattr(mapped_file, "_Mapping", Limited)
    data = equal_blend(write_dataset, count)
    for _ in range(2):
        samples = built(data, {"train": 100}).train
        assert samples is not None
        for number in range(3 * count):
            assert samples[number].tolist() == [number % count] * 17
        del samples
        gc.collect()
    most = 12
    with pytest.raises(ResourceError, match="too many"):
        built(data, {"train": 100}).train.take(range(count))


def test_a_later_start_reads_what_is_known_of_all_data_sets_from_few_files(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of ranks that each open all files of a blend would take minutes on a shared file system."""
    for module in (fingerprint, indexed_dataset, map_cache):
        monkeypatch.setattr(module, "CHECKED_ONCE", 1)
    read, folder = list[str](), Path(prefixes[0]).parent / "index-cache"

    def counted(path: Path) -> np.ndarray:
        read.append(Path(path).name)
        return mapped_file.map_file(path)

    for module in (index_file, indexed_dataset, map_cache):
        monkeypatch.setattr(module, "map_file", counted)
    data = blend(prefixes, "1", "2", "3")

    def start() -> tuple[Any, str, list[str]]:
        read.clear()
        samples = built(data).train
        content = fingerprint.blend_hash(data.contents, lambda prefix: folder)
        return samples, content, sorted({name for name in read if not name.startswith("blend_")})

    first, content, _ = start()
    expected = first.take(range(100))
    later, found, opened = start()
    assert (opened, found) == ([], content) and np.array_equal(later.take(range(100)), expected)
    assert len([name for name in read if name.startswith("part1")]) == 5, "opened when they are read: both, three maps"

    os.utime(f"{prefixes[1]}.idx", ns=(1, 1))
    changed, found, opened = start()
    assert (
        found == content and opened and all(name.startswith("part1") or name.endswith("_hash.npy") for name in opened)
    )
    assert np.array_equal(changed.take(range(100)), expected)

    (record,) = folder.glob("blend_*_known.json")
    names = json.loads(record.read_text())
    fields = Known(*names[prefixes[0]])
    wrong = [
        fields[:-1],
        fields._replace(dtype="|O"),
        fields._replace(header="zz"),
        fields._replace(counts=(1 << 60, 1 << 60)),
        (*fields[:3], [1], *fields[4:]),
        fields._replace(totals=Totals(*fields.totals)._replace(empty=-1)),
        fields._replace(parts=[(0, 1, 1 << 60)]),
    ]
    for damaged in ("", "[]", '{"a": 1}', *(json.dumps(names | {prefixes[0]: one}) for one in wrong)):
        record.write_text(damaged)
        assert np.array_equal(start()[0].take(range(100)), expected)
    unread = start()[0]
    os.utime(f"{prefixes[2]}.idx", ns=(1, 1))
    with pytest.raises(DataError, match="part2.* was replaced after"):
        unread.take(range(100))


@pytest.mark.parametrize("kind", ["sources", "places", "documents", "samples", "shuffle", "runs", "order"])
def test_a_number_out_of_range_in_a_map_that_was_checked_before_is_no_traceback(
    prefixes: list[str], sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A bit of each number is flipped; sizes and times of the files are those of the check."""
    monkeypatch.setattr(map_cache, "CHECKED_ONCE", 1)
    data = blend(prefixes, "1", "2", "3")
    if is_bert := kind in ("runs", "order"):
        texts, words = (str(sentences / name) for name in ("text_sentence", "vocab.txt"))
        kind_of_words = {"vocab_file": words, "tokenizer_type": "BertWordPieceLowerCase"}
        data = DataConfig(data_path=(texts,), seq_length=40, **kind_of_words)
    data = replace(data, data_cache_path=str(tmp_path / "cache"))
    size = TEXT_TOKENS if is_bert else 60_000
    built(data, vocab_size=size, masked_lm=is_bert)
    for file in (tmp_path / "cache").glob(f"*_{kind}.npy"):
        array, time = np.load(file), file.stat().st_mtime_ns
        np.save(file, array | 1 << 8 * array.itemsize - 2)
        os.utime(file, ns=(time, time))
    with pytest.raises(DataError, match=f"{tmp_path}/cache/.*: a number is out of range"):
        built(data, vocab_size=size, masked_lm=is_bert).train.take(range(100))


@pytest.mark.parametrize("weights", [(3, 5, 17), (1, 1), (90, 1, 1, 1, 1, 1), (7, 123, 1000, 13)])
def test_a_blend_has_the_same_order_in_windows(weights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
    order = BlendOrder(shares, 400)
    whole = [order[sample] for sample in range(400)]
    monkeypatch.setattr(blend_order, "BLEND_WINDOW", 7)
    windowed = BlendOrder(shares, 400)
    assert [windowed[sample] for sample in range(400)] == whole
    for requested, sample in ((400, 399), (400, 5), (300, 7), (15, 14)):
        assert BlendOrder(shares, requested)[sample] == whole[sample]


def test_what_precedes_a_window_is_known_without_the_windows_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on after billions of samples computes neither their order nor reads it."""
    chance = random.Random(3)
    lists = [[chance.randint(1, 99) for _ in range(chance.randint(1, 30))] for _ in range(40)]
    for weights in [*lists, [1, 1], [1], [90, 1, 1, 1, 1, 1], [5000, 1, 3, 2], [1, 2, 4, 8, 16, 32, 64, 128]]:
        shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
        order, taken = BlendOrder(shares, 1500), [0] * len(shares)
        for position in range(min(1500, sum(weights))):
            assert position % 7 or taken_before(shares, position) == tuple(taken), (weights, position)
            taken[order[position][0]] += 1
    monkeypatch.setattr(blend_order, "BLEND_WINDOW", 50)
    shares = tuple(Fraction(weight, 100003) for weight in (33331, 33331, 33341))
    firsts: list[int] = []

    def load(window: BlendWindow) -> dict[str, np.ndarray]:
        firsts.append(window.first)
        return window.build()

    late = [BlendOrder(shares, 100003, load)[sample] for sample in (77777, 77778)]
    assert firsts == [0, 77750, 0, 77750]
    firsts.clear()
    order = BlendOrder(shares, 100003, load)
    assert [order[sample] for sample in range(77779)][77777:] == late
    assert firsts == list(range(0, 77779, 50))
