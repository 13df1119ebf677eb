"""The maps on disk: complete or absent, rebuilt if damaged, equal for all processes."""

import io
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data import fingerprint, indexed_dataset, map_cache
from megatron.data.gpt2_dataset import IndexMaps, SampleStream
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.map_cache import cached
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


def saved(array: np.ndarray, **settings: bool) -> bytes:
    np.save(file := io.BytesIO(), array, **settings)
    return file.getvalue()


def damaged(content: bytes, trap: Trap) -> dict[str, bytes]:
    """What may be in place of a file of an array that is no array of its type and shape."""
    array = np.load(io.BytesIO(content))
    return {
        "empty": b"",
        "torn": content[:-9],
        "header": content[:20],
        "unparsed": content.replace(b"(", b"[").replace(b"{", b"(("),
        "garbage": b"\xff" * 400,
        "pickle": saved(np.array([trap], object), allow_pickle=True),
        "floats": saved(array.astype(np.float32)),
        "of the other byte order": saved(array.astype(array.dtype.newbyteorder())),
        "too short": saved(array[:-1]),
        "of another rank": saved(array.reshape(1, *array.shape)),
        "no numbers": saved(array[:0]),
    }


@pytest.mark.parametrize("name", sorted(FILES))
def test_what_is_no_array_of_its_form_is_rebuilt(tmp_path: Path, name: str) -> None:
    cached(tmp_path, "x", RECIPE)
    path = tmp_path / name
    content = path.read_bytes()
    for damage in damaged(content, Trap(tmp_path / "sprung")).values():
        path.write_bytes(damage)
        assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
        assert path.read_bytes() == content
    path.unlink()
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert path.read_bytes() == content and not (tmp_path / "sprung").exists()


def test_a_large_index_is_checked_and_hashed_once(tmp_path: Path, monkeypatch, write_dataset) -> None:
    prefix, checks = write_dataset([[1, 2], [3], [4, 5, 6]]), []
    check, hash_of = indexed_dataset.check, fingerprint._data_hash
    monkeypatch.setattr(indexed_dataset, "check", lambda *a: checks.append("index") or check(*a))
    monkeypatch.setattr(fingerprint, "_data_hash", lambda *a: checks.append("hash") or hash_of(*a))
    for module in (indexed_dataset, fingerprint):
        monkeypatch.setattr(module, "SMALL", 1)
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


def test_without_a_folder_to_write_maps_stay_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    maps = IndexMaps(**cached(tmp_path / "file" / "index-cache", "x", RECIPE))
    assert_right(maps)
    assert maps.samples.flags.writeable


def test_a_file_that_cannot_be_replaced_keeps_maps_in_memory(tmp_path: Path) -> None:
    (tmp_path / "x_shuffle.npy").mkdir()
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert {path.name for path in tmp_path.iterdir()} <= FILES | {"x.lock"}


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
    for name in ("SMALL", "LARGE"):
        monkeypatch.setattr(map_cache, name, 1)
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


@pytest.mark.parametrize(("small", "flushed"), [(1, 3), (1 << 20, 0)])
def test_large_arrays_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, flushed: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(map_cache, "SMALL", small)
    monkeypatch.setattr(os, "fsync", calls.append)
    assert_right(IndexMaps(**cached(tmp_path, "x", RECIPE)))
    assert len(calls) == flushed
