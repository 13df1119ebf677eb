"""The maps, built without a loop, against a plain walk through the tokens."""

import numpy as np
import pytest

from megatron.data.index_maps import IndexMaps, SampleStream


def stream(lengths: list[int], *, seq_length: int, requested: int, seed: int = 1234, salt: int = 0) -> SampleStream:
    return SampleStream(np.array(lengths, np.int64), seq_length, requested, seed, salt)


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
    maps = IndexMaps(**stream(lengths, seq_length=seq_length, requested=requested).build())
    samples = len(maps.shuffle)
    assert samples >= requested
    assert maps.samples.tolist() == [list(at) for at in walk(lengths, maps.documents.tolist(), seq_length, samples)]


@pytest.mark.parametrize(("lengths", "seq_length", "requested"), CASES)
def test_every_epoch_has_each_document_and_each_sample_once(
    lengths: list[int], seq_length: int, requested: int
) -> None:
    plan = stream(lengths, seq_length=seq_length, requested=requested)
    maps = IndexMaps(**plan.build())
    for epoch in np.split(maps.documents, plan.document_epochs):
        assert sorted(epoch) == list(range(len(lengths)))
    for epoch in range(plan.epochs):
        block = range(plan.first_sample(epoch), plan.first_sample(epoch + 1))
        assert sorted(maps.shuffle[block.start : block.stop]) == list(block)
        assert all(epoch * plan.tokens <= sample * seq_length < (epoch + 1) * plan.tokens for sample in block)


@pytest.mark.parametrize(("lengths", "seq_length", "requested"), CASES)
def test_a_longer_run_begins_as_the_shorter_one(lengths: list[int], seq_length: int, requested: int) -> None:
    short = IndexMaps(**stream(lengths, seq_length=seq_length, requested=requested).build())
    long = IndexMaps(**stream(lengths, seq_length=seq_length, requested=3 * requested + 5).build())
    assert len(long.shuffle) > len(short.shuffle)
    for name in ("documents", "samples", "shuffle"):
        part = getattr(short, name)
        np.testing.assert_array_equal(part, getattr(long, name)[: len(part)])


def test_golden_maps() -> None:
    """Pins the order: training that resumes with another version of the program or of NumPy must not see another."""
    maps = IndexMaps(**stream([5, 3, 7, 1, 4], seq_length=4, requested=6).build())
    assert maps.documents.tolist() == GOLDEN.documents.tolist()
    assert maps.samples.tolist() == GOLDEN.samples.tolist()
    assert maps.shuffle.tolist() == GOLDEN.shuffle.tolist()
    assert (maps.documents.dtype, maps.samples.dtype, maps.shuffle.dtype) == (np.int32, np.int32, np.uint32)


GOLDEN = IndexMaps(
    documents=np.array([1, 3, 4, 2, 0, 1, 3, 2, 4, 0, 2, 1, 4, 3, 0]),
    samples=np.array([[0, 0], [2, 0], [3, 0], [3, 4], [4, 1], [5, 0], [7, 0], [7, 4], [8, 1], [9, 1], [10, 0]]),
    shuffle=np.array([1, 2, 0, 4, 3, 8, 5, 9, 7, 6]),
)


def test_a_document_longer_than_int32_widens_the_offsets() -> None:
    maps = IndexMaps(**stream([2**31 + 10], seq_length=2**30, requested=1).build())
    assert maps.samples.dtype == np.int64
    assert maps.samples[2].tolist() == [0, 2**31]
