"""The maps on disk: complete or absent, rebuilt if damaged, equal for all processes."""

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from megatron.common.files import replace_file
from megatron.config import DataConfig
from megatron.data import fingerprint, indexed_dataset, map_cache
from megatron.data.gpt2_dataset import IndexMaps, SampleStream
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.map_cache import cached
from megatron.data.mapped_file import map_file, parse_npy, write_npy
from megatron.tools.audit.case import check_contents

STREAM = SampleStream(np.arange(1, 50), 8, 1234)
RECIPE = STREAM.recipe(2)
FILES = {"x_documents.npy", "x_samples.npy", "x_shuffle.npy"}


def assert_right(maps: IndexMaps) -> None:
    """Compare with maps built without a cache."""
    expected = IndexMaps(**STREAM.build(2))
    for name in ("documents", "samples", "shuffle"):
        np.testing.assert_array_equal(getattr(maps, name), getattr(expected, name))
        assert getattr(maps, name).dtype == getattr(expected, name).dtype


def test_maps_are_stored_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "index-cache"
    assert_right(IndexMaps(**cached(folder, "x", RECIPE)))
    assert {path.name for path in folder.iterdir()} == FILES | {"x.lock"}
    stored = {path: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    maps = IndexMaps(**cached(folder, "x", RECIPE))
    assert_right(maps)
    assert not maps.samples.flags.writeable
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.npy")} == stored


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("damage", ["empty", "torn", "header", "unparsed", "garbage", "pickle", "gone"])
def test_a_broken_file_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    IndexMaps(**cached(tmp_path, "x", RECIPE))
    path = tmp_path / name
    content = path.read_bytes()
    path.unlink()
    if damage == "pickle":
        np.save(path, np.array([Trap(tmp_path / "sprung")], object), allow_pickle=True)
    elif damage != "gone":
        damaged = {"empty": b"", "torn": content[:-9], "header": content[:20], "garbage": b"\xff" * 400}
        damaged["unparsed"] = content.replace(b"(", b"[").replace(b"{", b"((")
        path.write_bytes(damaged[damage])
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert path.read_bytes() == content
    assert not (tmp_path / "sprung").exists()


WRONG: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "out of range": lambda array: array + array.max().astype(array.dtype),
    "negative": lambda array: array.astype(np.int64) - 1,
    "negative in the same type": lambda array: np.where(array == 3, -1, array.astype(np.int64)).astype(array.dtype),
    "a number twice": lambda array: np.where(array == 3, 2, array).astype(array.dtype),
    "floats": lambda array: array.astype(np.float32),
    "booleans": lambda array: array.astype(np.bool_),
    "of the other byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    "too short": lambda array: array[:-1],
    "flat": lambda array: array.reshape(-1, 1),
    "empty": lambda array: array[:0],
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_numbers_that_do_not_fit_are_rebuilt(tmp_path: Path, name: str) -> None:
    IndexMaps(**cached(tmp_path, "x", RECIPE))
    path, right = tmp_path / name, np.load(tmp_path / name)
    changes = WRONG | ({"in reverse": lambda array: array[::-1]} if name != "x_shuffle.npy" else {})
    for change in changes.values():
        np.save(path, change(right))
        assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
        np.testing.assert_array_equal(np.load(path), right)


def test_large_arrays_are_checked_once(tmp_path: Path, monkeypatch) -> None:
    """By the process that builds or first finds them; files of another time are checked again."""
    monkeypatch.setattr(map_cache, "CHECKED_ONCE", 1)
    checked = []
    monkeypatch.setattr(map_cache, "_covers", lambda *_: checked.append(1) or True)
    cached(tmp_path, "x", RECIPE)
    assert not checked, "what was built is right"
    (tmp_path / "x_checked.json").unlink()
    for _ in range(2):
        assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
        assert len(checked) == 2
    os.utime(tmp_path / "x_samples.npy", ns=(1, 1))
    cached(tmp_path, "x", RECIPE)
    assert len(checked) == 4


@pytest.mark.parametrize("unit", [7, 1 << 28])
def test_missing_numbers_are_found_part_by_part(monkeypatch, unit: int) -> None:
    monkeypatch.setattr(map_cache, "_NUMBERS_AT_ONCE", unit)
    array = np.random.RandomState(1).permutation(20)
    assert map_cache._covers(array, 20)
    for number in range(20):
        assert not map_cache._covers(np.where(array == number, (number + 1) % 20, array), 20)


def test_a_large_index_is_checked_and_hashed_once(tmp_path: Path, monkeypatch, write_dataset) -> None:
    prefix, checks = write_dataset([[1, 2], [3], [4, 5, 6]]), []
    check, hash_of = indexed_dataset.check, fingerprint._data_hash
    monkeypatch.setattr(indexed_dataset, "check", lambda *a: checks.append("index") or check(*a))
    monkeypatch.setattr(fingerprint, "_data_hash", lambda *a: checks.append("hash") or hash_of(*a))
    for module in (indexed_dataset, fingerprint):
        monkeypatch.setattr(module, "CHECKED_ONCE", 1)
    for _ in range(2):
        indexed = IndexedDataset(prefix, cache=tmp_path)
        assert (indexed.num_tokens, indexed.totals.longest) == (6, 3)
        assert fingerprint.data_hash(prefix, tmp_path) == hash_of(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
        assert checks == ["index", "hash"]
    data = DataConfig(data_path=(prefix,), data_cache_path=str(tmp_path), data_hash=fingerprint.data_hash(prefix))
    checks.clear()
    check_contents(data, "a checkpoint")
    assert checks == [], "an audit reads it no more"
    checks += ["index", "hash"]
    os.utime(f"{prefix}.idx", ns=(1, 1))
    IndexedDataset(prefix, cache=tmp_path)
    assert checks == ["index", "hash", "index"]


def test_where_nothing_can_be_written_maps_stay_in_memory(tmp_path: Path) -> None:
    """Where a folder would be there is a file, or the other way round."""
    (tmp_path / "file").write_text("not a folder")
    maps = IndexMaps(**cached(tmp_path / "file" / "index-cache", "x", RECIPE))
    assert_right(maps)
    assert maps.samples.flags.writeable
    (folder := tmp_path / "folder").mkdir()
    (folder / "x_shuffle.npy").mkdir()
    assert_right(IndexMaps(**cached(folder, "x", RECIPE)))
    assert {path.name for path in folder.iterdir()} <= FILES | {"x.lock"}


def failing(kind: int, call: Callable | None = None) -> Callable:
    def fail(*arguments: object) -> None:
        if call:
            call(*arguments)
        raise OSError(kind, os.strerror(kind))

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (os, "posix_fallocate", failing(errno.EDQUOT)),
        (np.lib.format, "open_memmap", failing(errno.EFBIG, np.lib.format.open_memmap)),
    ],
)
def test_what_does_not_fit_is_right_and_leaves_no_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: Callable
) -> None:
    """The empty file took the name of the maps, before."""
    monkeypatch.setattr(map_cache, "CHECKED_ONCE", 1)
    with monkeypatch.context() as limited:
        limited.setattr(owner, name, value)
        assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("size", [3900, 4000, 20000])
def test_an_array_that_is_cut_off_is_an_error(tmp_path: Path, size: int) -> None:
    """NumPy would not report that the last bytes, which it holds back, cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    array = np.arange(size) % 7
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with (
            pytest.raises(OSError, match="too large") if size > 3968 else nullcontext(),
            replace_file(tmp_path / "x.npy") as file,
        ):
            write_npy(file, array.astype(np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [size + 128] * (size <= 3968)


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), (0, 2)])
def test_an_array_is_read_as_it_was_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape[::-1]).T
    with open(tmp_path / "x.npy", "wb") as file:
        write_npy(file, array)
    np.testing.assert_array_equal(parse_npy(map_file(tmp_path / "x.npy")), array)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), array)


def build_at_once(pipe: Connection, folder: Path) -> None:
    """Wait for the others, then ask for the maps."""
    pipe.send("ready")
    pipe.recv()
    maps = IndexMaps(**cached(folder, "x", RECIPE))
    pipe.send([getattr(maps, name).tobytes() for name in ("documents", "samples", "shuffle")])


def test_concurrent_processes_have_the_same_maps(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=build_at_once, args=(theirs, tmp_path)))
        processes[-1].start()
        pipes.append(ours)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * 4
    for pipe in pipes:
        pipe.send("go")
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    expected = IndexMaps(**STREAM.build(2))
    assert results == [[getattr(expected, name).tobytes() for name in ("documents", "samples", "shuffle")]] * 4
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"x.lock"}


def test_what_a_killed_process_leaves_is_no_obstacle_and_is_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(map_cache, "LARGE", 1)
    other = tmp_path / ".xy_samples.0badc0de.partial"
    other.write_text("of other maps")

    def die(make: map_cache.Make) -> map_cache.Arrays:
        make("samples")[:] = 0
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    process = multiprocessing.get_context("fork").Process(
        target=cached, args=(tmp_path, "x", RECIPE._replace(build=die))
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(list(tmp_path.glob(".x_samples.*"))) == 1
    (left,) = tmp_path.glob(".x_samples.*")
    fresh = left.with_name(".x_samples.of a host without the lock.partial")
    fresh.write_text("written to now")
    os.utime(left, (1, 1))
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"x.lock", other.name, fresh.name}


@pytest.mark.parametrize(("checked_once", "flushed"), [(1, 3), (1 << 20, 0)])
def test_arrays_that_are_not_checked_again_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked_once: int, flushed: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(map_cache, "CHECKED_ONCE", checked_once)
    monkeypatch.setattr(os, "fsync", calls.append)
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert len(calls) == flushed
    assert (tmp_path / "x_checked.json").exists() == bool(flushed)
