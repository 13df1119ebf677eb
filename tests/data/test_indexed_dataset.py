"""The format, byte for byte; every kind of damage is found when the data set is opened."""

import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.common.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.data.map_cache import CHECKED_ONCE

GOLDEN_IDX = bytes.fromhex(
    "4d4d4944494458000001000000000000000802000000000000000300000000000000"
    "0300000002000000"
    "00000000000000000600000000000000"
    "000000000000000001000000000000000200000000000000"
)
GOLDEN_BIN = bytes.fromhex("01000200030004000500")
GOLDEN_DOCUMENTS = [[1, 2, 3], [4, 5]]
LEGACY_IDX = struct.pack("<8s17q", b"TNTIDX", 1, 8, 2, 2, 2, 3, *(0, 1, 2), *(0, 3, 5), *(3, 2), *(0, 1, 2))
"""The index of Megatron-LM's lazy and cached data sets for the same tokens."""


def test_writes_the_golden_bytes(write_dataset: Callable[..., str]) -> None:
    prefix = write_dataset(GOLDEN_DOCUMENTS)
    assert Path(f"{prefix}.idx").read_bytes() == GOLDEN_IDX
    assert Path(f"{prefix}.bin").read_bytes() == GOLDEN_BIN


def test_a_document_may_have_several_sequences(tmp_path: Path) -> None:
    """Some written at once, then none, then others one by one: the same bytes."""
    for name in ("at once", "one by one"):
        with IndexedDatasetBuilder(tmp_path / name, "u2") as builder:
            if name == "at once":
                builder.add_documents(np.arange(6), [[3, 0], [], [1, 2]])
                builder.add_documents(np.empty(0, "u2"), [])
            else:
                for document in ([[0, 1, 2], []], [], [[3], np.array([9, 4, 9, 5])[1::2]]):
                    builder.add_document(*document)
            builder.add_document([7])
    for ending in ("bin", "idx"):
        assert (tmp_path / f"at once.{ending}").read_bytes() == (tmp_path / f"one by one.{ending}").read_bytes()
    dataset = IndexedDataset(tmp_path / "at once")
    assert dataset.doc_idx.tolist() == [0, 2, 2, 4, 5]
    assert dataset.document_starts.tolist() == [0, 3, 3, 6, 7]
    assert dataset.span(1, 3).tolist() == [1, 2, 3]


def test_damaged_numbers_in_the_cache_are_computed_again(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    prefix = write_dataset([[token % 9] for token in range(CHECKED_ONCE // 20)])
    tokens = IndexedDataset(prefix, cache=tmp_path).num_tokens
    (stored,) = tmp_path.glob("*_index.npy")
    np.save(stored, np.zeros_like(np.load(stored)))
    assert IndexedDataset(prefix, cache=tmp_path).num_tokens == tokens


@pytest.mark.parametrize("index", [GOLDEN_IDX, LEGACY_IDX], ids=["mmap", "lazy"])
def test_reads_the_golden_bytes(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "data.idx").write_bytes(index)
    (tmp_path / "data.bin").write_bytes(GOLDEN_BIN)
    dataset = IndexedDataset(tmp_path / "data")
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (2, 2, 5)
    assert dataset.dtype == np.uint16
    assert dataset.sizes.tolist() == [3, 2]
    assert dataset.pointers.tolist() == [0, 6]
    assert dataset.doc_idx.tolist() == [0, 1, 2]
    assert [dataset.get(n).tolist() for n in range(2)] == GOLDEN_DOCUMENTS
    assert dataset.run(0, 2).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_every_integer_type_is_written_and_read(write_dataset: Callable[..., str], dtype: str) -> None:
    limits = np.iinfo(dtype)
    documents = [[limits.min, limits.max, 7], [], [0]]
    dataset = IndexedDataset(write_dataset(documents, dtype))
    assert dataset.dtype == np.dtype(dtype)
    assert [dataset.get(n).tolist() for n in range(3)] == documents


def replaced(offset: int, layout: str, *values: int) -> bytes:
    """The golden index with some bytes replaced."""
    index = bytearray(GOLDEN_IDX)
    struct.pack_into(layout, index, offset, *values)
    return bytes(index)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        pytest.param(b"", "truncated: 0 bytes", id="empty"),
        pytest.param(GOLDEN_IDX[:20], "truncated: 20 bytes", id="header cut off"),
        pytest.param(GOLDEN_IDX[:81], "ends at offset 81, its header promises 82 bytes", id="one byte short"),
        pytest.param(GOLDEN_IDX + b"\x00", "1 bytes too many at offset 82", id="one byte long"),
        pytest.param(LEGACY_IDX[:-1], "of the older lazy or cached format (TNTIDX), is truncated", id="legacy"),
        pytest.param(LEGACY_IDX[:56] + bytes(88), "the bounds of its documents contradict", id="legacy documents"),
        pytest.param(b"PK\x03\x04" + GOLDEN_IDX, "not an index: offset 0 holds b'PK", id="other magic"),
        pytest.param(replaced(9, "<Q", 2), "version 2 at offset 9", id="version"),
        pytest.param(replaced(17, "<B", 9), "dtype code 9 at offset 17, which is no type of integers", id="dtype"),
        pytest.param(replaced(17, "<B", 6), "dtype code 6 at offset 17, which is no type of integers", id="float"),
        pytest.param(replaced(18, "<Q", 2**62), "is truncated", id="huge count of sequences"),
        pytest.param(replaced(26, "<Q", 2**63), "is truncated", id="huge count of documents"),
        pytest.param(replaced(34, "<i", -3), "the bounds of its sequences contradict", id="negative size"),
        pytest.param(replaced(42, "<q", 2), "the bounds of its sequences contradict", id="first pointer"),
        pytest.param(replaced(50, "<q", -6), "the bounds of its sequences contradict", id="pointer backwards"),
        pytest.param(replaced(50, "<q", 4), "the bounds of its sequences contradict", id="overlap"),
        pytest.param(replaced(58, "<q", 1), "the bounds of its documents contradict", id="first document"),
        pytest.param(replaced(66, "<qq", 2, 1), "the bounds of its documents contradict", id="document backwards"),
        pytest.param(replaced(74, "<q", 9), "the bounds of its documents contradict", id="last document"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: bytes, message: str) -> None:
    (tmp_path / "data.idx").write_bytes(index)
    (tmp_path / "data.bin").write_bytes(GOLDEN_BIN)
    with pytest.raises(DataError) as caught:
        IndexedDataset(tmp_path / "data")
    assert message in str(caught.value)
    assert str(tmp_path / "data.idx") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "message"), [(GOLDEN_BIN[:-1], "is truncated: it has 9 bytes"), (GOLDEN_BIN + b"\0\0", "12 bytes")]
)
def test_a_token_file_of_another_size_is_refused(tmp_path: Path, tokens: bytes, message: str) -> None:
    (tmp_path / "data.idx").write_bytes(GOLDEN_IDX)
    (tmp_path / "data.bin").write_bytes(tokens)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "data")


def test_missing_files_are_named(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"data\.bin and .*data\.idx missing"):
        IndexedDataset(tmp_path / "data")
    prefix = write_dataset(GOLDEN_DOCUMENTS)
    with pytest.raises(DataError, match=f"without the ending: {prefix}"):
        IndexedDataset(f"{prefix}.bin")
    os.remove(f"{prefix}.bin")
    with pytest.raises(DataError, match=r"data\.bin missing"):
        IndexedDataset(prefix)


def test_exception_keeps_the_existing_data_set(write_dataset: Callable[..., str]) -> None:
    prefix = write_dataset(GOLDEN_DOCUMENTS)
    with pytest.raises(KeyError), IndexedDatasetBuilder(prefix, "u2") as builder:
        builder.add_document([7])
        raise KeyError
    assert IndexedDataset(prefix).get(0).tolist() == [1, 2, 3]


def test_two_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        builder.add_document([1])
        with pytest.raises(DataError, match="being written by another process"):
            IndexedDatasetBuilder(tmp_path / "data", "u2").__enter__()
    assert IndexedDataset(tmp_path / "data").num_tokens == 1


def write_endlessly(prefix: str) -> None:
    """A writer that never ends."""
    with IndexedDatasetBuilder(prefix, "u2") as builder:
        while True:
            builder.add_document(range(10000))


def test_files_of_a_killed_writer_are_overwritten(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    process = multiprocessing.get_context("spawn").Process(target=write_endlessly, args=(str(tmp_path / "data"),))
    process.start()
    partial = tmp_path / "data.bin.partial"
    while not partial.exists() or partial.stat().st_size == 0:
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert {path.name for path in tmp_path.iterdir()} == {f"data.{end}.partial" for end in ("bin", "idx", "documents")}
    assert IndexedDataset(write_dataset(GOLDEN_DOCUMENTS)).num_tokens == 5
    assert {path.name for path in tmp_path.iterdir()} == {"data.bin", "data.idx"}


def test_writer_continues_from_an_earlier_state(tmp_path: Path) -> None:
    documents = [list(range(n % 7 + 1)) for n in range(100)]
    with IndexedDatasetBuilder(tmp_path / "whole", "u2") as builder:
        for document in documents:
            builder.add_document(document)
    with pytest.raises(KeyError), IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        for document in documents[:70]:
            if document is documents[40]:
                written, builder.keeps = builder.sync(), True
            builder.add_document(document)
        raise KeyError
    with IndexedDatasetBuilder(tmp_path / "data", "u2", written) as builder:
        for document in documents[40:]:
            builder.add_document(document)
    for end in ("bin", "idx"):
        assert (tmp_path / f"data.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    with pytest.raises(DataError, match="is shorter than when it was left"):
        IndexedDatasetBuilder(tmp_path / "data", "u2", written).__enter__()


def test_a_part_is_read_from_the_disk_without_what_is_around_it(write_dataset: Callable[..., str]) -> None:
    def from_disk() -> int:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["read_bytes"])

    indexed = IndexedDataset(write_dataset([list(range(50_000))] * 40))
    with open(indexed.bin_path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = from_disk()
    assert indexed.span(1_010_000, 2500).tolist() == list(range(10_000, 12_500))
    assert from_disk() - before < 40_000
