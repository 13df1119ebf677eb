"""The maps, built without a loop, against a plain walk through the tokens."""

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from megatron.data import gpt2_dataset, index_file
from megatron.data.gpt2_dataset import IndexMaps, SampleStream
from megatron.data.indexed_dataset import DocumentLengths, IndexedDataset
from megatron.data.map_cache import in_memory


def epochs_of(lengths: list[int], seq_length: int, requested: int) -> dict[int, IndexMaps]:
    """The maps of the epochs in which the first ``requested`` samples start."""
    stream = SampleStream(np.array(lengths, np.int64), seq_length, 1234)
    return {epoch: IndexMaps(**stream.build(epoch)) for epoch in sorted(set(map(stream.epoch_of, range(requested))))}


def walk(lengths: list[int], documents: list[int], seq_length: int, samples: int) -> list[tuple[int, int]]:
    """Where each sample starts, found by stepping over the tokens one by one."""
    tokens = [(position, offset) for position, document in enumerate(documents) for offset in range(lengths[document])]
    return [tokens[sample * seq_length] for sample in range(samples + 1)]


CASES = [
    pytest.param([5, 3, 7, 1, 4], 4, 4, id="one epoch"),
    pytest.param([5, 3, 7, 1, 4], 4, 23, id="several epochs"),
    pytest.param([5, 0, 3, 0, 0, 7], 6, 11, id="empty documents"),
    pytest.param([4, 4, 4], 4, 9, id="samples end with documents"),
    pytest.param([2, 1], 7, 5, id="a sample spans epochs"),
    pytest.param([1], 1, 6, id="one token"),
    pytest.param([100], 3, 70, id="one document"),
]


@pytest.mark.parametrize(("lengths", "seq_length", "requested"), CASES)
def test_samples_equal_a_sequential_scan(lengths: list[int], seq_length: int, requested: int) -> None:
    """And every epoch has each document and each of its samples once."""
    maps, sampled = epochs_of(lengths, seq_length, requested), SampleStream(np.array(lengths), seq_length, 1234)
    orders: dict[int, list[int]] = {}
    for epoch, one in maps.items():
        parts = one.documents.reshape(-1, len(lengths)).tolist()
        for later, order in enumerate(parts, start=epoch):
            assert orders.setdefault(later, order) == order, "the order of an epoch does not depend on where it is read"
            assert sorted(order) == list(range(len(lengths)))
        assert sorted(one.shuffle) == list(range(sampled.first_sample(epoch + 1) - sampled.first_sample(epoch)))
    stream = [document for _, order in sorted(orders.items()) for document in order]
    assert list(orders) == list(range(len(orders)))
    found, count = [], sum(len(one.shuffle) for one in maps.values())
    for epoch, one in maps.items():
        found += [[epoch * len(lengths) + position, offset] for position, offset in one.samples.tolist()[:-1]]
    assert count >= requested
    # Empty documents aside, a place in the stream has one name.
    assert found == [list(at) for at in walk(lengths, stream, seq_length, count)][:-1]


def test_golden_maps() -> None:
    """Pins the order: training that resumes with another version of the program or of NumPy must not see another."""
    first, second = epochs_of([5, 3, 7, 1, 4], 4, 6).values()
    assert first.documents.tolist() == [1, 3, 4, 2, 0, 1, 3, 2, 4, 0]
    assert first.samples.tolist() == [[0, 0], [2, 0], [3, 0], [3, 4], [4, 1], [5, 0]]
    assert first.shuffle.tolist() == [1, 2, 0, 4, 3]
    assert second.documents.tolist() == [1, 3, 2, 4, 0, 2, 1, 4, 3, 0]
    assert second.samples.tolist() == [[0, 0], [2, 0], [2, 4], [3, 1], [4, 1], [5, 0]]
    assert second.shuffle.tolist() == [3, 0, 4, 2, 1]
    assert (first.documents.dtype, first.samples.dtype, first.shuffle.dtype) == (np.int32, np.int32, np.uint32)


def test_a_document_longer_than_int32_widens_the_offsets() -> None:
    maps = IndexMaps(**SampleStream(np.array([2**31 + 10]), 2**30, 1234).build(0))
    assert maps.samples.dtype == np.int64
    assert maps.samples[2].tolist() == [0, 2**31]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("lengths", "seq_length", "requested"), CASES)
def test_maps_do_not_depend_on_how_much_is_built_at_a_time(
    monkeypatch, write_dataset: Callable[..., str], rows: int, lengths: list[int], seq_length: int, requested: int
) -> None:
    """Nor on whether the lengths are in memory, nor on how many processes build. Documents and shuffle are permutations
    of NumPy's frozen generator."""
    expected = epochs_of(lengths, seq_length, requested)
    monkeypatch.setattr(gpt2_dataset, "ROWS", rows)
    monkeypatch.setattr(index_file, "ROWS", rows)
    indexed = IndexedDataset(write_dataset([[7], *([1] * length for length in lengths), [8, 9]]))
    stream = SampleStream(DocumentLengths(indexed, range(1, len(lengths) + 1)), seq_length, 1234)
    assert (stream.tokens, indexed.totals.longest) == (sum(lengths), max(*lengths, 2))
    for epoch, maps in expected.items():
        for name, array in stream.build(epoch).items():
            np.testing.assert_array_equal(array, getattr(maps, name))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _: range(3))  # so that three processes build
            for name, array in stream.build(epoch, partial(in_memory, stream.recipe(epoch))).items():
                np.testing.assert_array_equal(array, getattr(maps, name))
        orders = maps.documents.reshape(-1, len(lengths))
        for purpose, order in ((0, orders[0]), (1, maps.shuffle)):
            random = np.random.RandomState([1234, 0, 0, epoch, purpose])
            np.testing.assert_array_equal(order, random.permutation(len(order)))


def test_of_the_next_epoch_there_are_the_documents_that_the_last_sample_can_need() -> None:
    lengths = np.random.RandomState(1).randint(0, 3, 500)
    stream = SampleStream(lengths, 7, 1234)
    for epoch in range(3):
        maps = IndexMaps(**stream.build(epoch))
        orders = [np.random.RandomState([1234, 0, 0, epoch + later, 0]).permutation(500) for later in range(2)]
        documents = np.concatenate(orders)
        assert 500 < len(maps.documents) == 500 + 8 + np.sum(lengths == 0) < 1000
        np.testing.assert_array_equal(maps.documents, documents[: len(maps.documents)])
        begins = np.arange(stream.first_sample(epoch), stream.first_sample(epoch + 1) + 1) * 7 - epoch * stream.tokens
        ends = np.cumsum(lengths[documents])
        positions = np.searchsorted(ends, begins, "right")
        assert maps.samples[:, 0].tolist() == positions.tolist()
        assert maps.samples[:, 1].tolist() == (begins - (ends - lengths[documents])[positions]).tolist()


def test_each_number_of_a_map_is_written_once() -> None:
    """The pages of a large file that are written in random order reach the disk many times."""

    class File(np.ndarray):
        written = 0

        def __setitem__(self, key: object, value: object) -> None:
            File.written += self[key].size
            super().__setitem__(key, value)

    stream = SampleStream(np.random.RandomState(1).randint(1, 9, 500), 7, 1234)
    maps = stream.build(0, lambda name: in_memory(stream.recipe(0), name).view(File))
    assert File.written == sum(array.size for array in maps.values())
    for name, array in stream.build(0).items():
        np.testing.assert_array_equal(maps[name], array)
