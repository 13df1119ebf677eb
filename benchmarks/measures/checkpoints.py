"""Speed of saving and loading checkpoints, compared with the disk and other formats; how long saves block training.

One process holds a GPT-2 with Adam's state in fp32; its file is written and read by several methods in alternation.
This project writes torch.save's format with SHA-256 and fsync; it verifies a hash and reads only tensors. Every
loading method ends with the state in the original tensors, as a resume does. Caches are warm unless stated otherwise.
What a save and a load cannot avoid is measured by itself: torch.save without a disk, SHA-256, and as limits all hashes
and the writing of the bytes, on two threads; torch.load of a mapped file, also after one reading of all bytes.
Then the same engine saves with and without --async-save, measuring the time until training can
continue; the first save of each kind is not counted. The disk is that of TMPDIR.
"""

import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves
from xxhash import xxh3_128

from benchmarks.comparing import Comparison, Quantity, Result, Seconds, Times, alternate, timed
from benchmarks.measures.peers import Shape
from benchmarks.measures.snapshots import of_snapshots
from benchmarks.measures.suite import run_of
from megatron.checkpoint.engine_files import EngineFiles, in_host_memory
from megatron.checkpoint.files import xxh128_of
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.tensor_files import ALLOWED, read_checked_file, read_file, write_file
from megatron.common.files import sync
from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.build import build_engine, train_batch
from megatron.engines.engine import use_checkpoint_engine
from megatron.launch.distributed import distributed
from megatron.parallel.tensor.random import model_parallel_manual_seed

SHAPE = Shape(layers=12, hidden=512, heads=8, sequence=64, batch=1, vocabulary=1024)
HASHES, MAPPED, HASHED = "hashes beside writing", "torch.load, mapped", "torch.load, mapped, after xxHash"
BLOCK = 1 << 20
SAVE_GOAL, LOAD_GOAL, STALL_GOAL = 0.85, 0.8, 0.1
"""Of what the raw disk takes; of safetensors' speed; of the time of a synchronous save."""


def measure(rounds: int) -> list[Result]:
    """Saving, loading, and waiting."""
    silence_known_warnings()
    with tempfile.TemporaryDirectory() as name:
        run = run_of(SHAPE, "--save", str(Path(name) / "run"))
        with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
            model_parallel_manual_seed(1, layout)
            engine = build_engine(run, layout)
            tokens = torch.zeros(SHAPE.batch, SHAPE.sequence, dtype=torch.long)  # [b, s]
            train_batch(engine, iter([Batch(tokens, (tokens, torch.full(tokens.shape, 1 / tokens.numel())))]))
            return [
                *_of_files(engine, Path(name) / "files", rounds),
                *_of_waiting(engine, run, rounds),
                *of_snapshots(engine, run, rounds, _seconds),
            ]


def _of_files(engine: Any, folder: Path, rounds: int) -> list[Comparison]:
    engine.checkpoint_engine = files = EngineFiles(copies=True)
    engine.save_checkpoint(str(folder), tag="measured", save_latest=False)
    ((path, state),) = files.take()
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(state))
    place = _Files(path, state, {name: tensor.contiguous() for name, tensor in tensors.items()})
    place.write_suite()
    place.content = path.read_bytes()
    size = len(place.content)
    writers: dict[str, Callable[[], Any]] = {
        "suite": place.write_suite,
        "raw bytes and fsync": place.write_raw,
        HASHES: place.write_hashed,
        "safetensors and fsync": place.write_safetensors,
        "torch.save and fsync": place.write_torch,
        "torch.save alone, without a disk": lambda: torch.save(state, _Nowhere()),
        "SHA-256 alone": lambda: hashlib.sha256(place.content),
        "CRC-32 alone": lambda: zlib.crc32(place.content),
    }
    written = alternate({name: partial(place.time, write) for name, write in writers.items()}, rounds)
    place.clear()
    place.write_suite()
    place.write_safetensors()
    readers = {
        "suite": lambda: place.take(_tensors(read_file(path, mapped=True))),
        "suite, digest apart": lambda: place.take(_tensors(read_checked_file(path, mapped=True))),
        "safetensors": lambda: place.take(load_file(place.other).items()),
        "safetensors after xxHash": lambda: (xxh128_of(place.other), place.take(load_file(place.other).items())),
        "torch.load": lambda: place.take(_tensors(torch.load(path, weights_only=False))),
        MAPPED: lambda: place.take(_tensors(_mapped(path))),
        HASHED: lambda: (xxh128_of(path), place.take(_tensors(_mapped(path)))),
        "reading bytes": path.read_bytes,
    }
    read = alternate(readers, rounds)
    cold = alternate({name: readers[name] for name in ("suite", "reading bytes")}, rounds, settle=lambda: _forget(path))
    return [
        *_compared("save", written, size, {"raw bytes and fsync": SAVE_GOAL}, {HASHES}),
        *_compared("load", read, size, {"safetensors": LOAD_GOAL}, {HASHED}),
        *_compared("load from a cold cache", cold, size),
    ]


class _Files:
    """One checkpoint's file, written in several ways."""

    def __init__(self, path: Path, state: Any, tensors: dict[str, Tensor]):
        self.path, self.state, self.tensors, self.content = path, state, tensors, b""
        self.other = path.with_suffix(".safetensors")
        self.into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def clear(self) -> None:
        """Delete what was written."""
        for file in self.path.parent.glob("*"):
            file.unlink()

    def time(self, write: Callable[[], Any]) -> Seconds:
        """What ``write`` takes in an empty folder, as a save has it."""
        self.clear()
        return timed(write, settle=os.sync)

    def write_suite(self) -> None:
        write_manifest(self.path.parent, {self.path.name: write_file(self.path, self.state)})

    def write_raw(self) -> None:
        self.path.write_bytes(self.content)
        sync(self.path)

    def write_hashed(self) -> None:
        """Every checksum of a save, and its bytes: SHA-256 in one thread, CRC-32 and xxHash in the one that writes."""
        whole, check, digest = memoryview(self.content), 0, xxh3_128()
        with ThreadPoolExecutor(1) as thread, open(self.path, "wb", buffering=0) as file:
            sha256 = thread.submit(hashlib.sha256, whole)
            for begin in range(0, len(whole), BLOCK):
                block = whole[begin : begin + BLOCK]
                check = zlib.crc32(block, check)
                digest.update(block)
                file.write(block)
            os.fsync(file.fileno())
            sha256.result()

    def write_safetensors(self) -> None:
        save_file(self.tensors, self.other)
        sync(self.other)

    def write_torch(self) -> None:
        torch.save(self.state, self.path)
        sync(self.path)

    def take(self, tensors: Any) -> None:
        """Copy what was read to where the state is wanted."""
        for name, tensor in tensors:
            self.into[name].copy_(tensor)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes | memoryview) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def _compared(
    what: str, times: dict[str, Times], size: int, goals: dict[str, float] | None = None, limits: Collection[str] = ()
) -> Iterator[Comparison]:
    goals, suite = goals or {}, times.pop("suite")
    apart, mapped = times.pop("suite, digest apart", None), times.pop(MAPPED, None)
    title = f"{what}: a checkpoint of {size / 1e6:,.0f} MB"
    for peer, theirs in times.items():
        yield Comparison(title, peer, suite, theirs, size, "B", goals.get(peer), peer in limits)
    if apart is not None and mapped is not None:
        title = f"{what}, unverified: the same"
        for peer, goal in goals.items():
            yield Comparison(title, peer, apart, times[peer], size, "B", goal)
        yield Comparison(title, MAPPED, apart, mapped, size, "B", is_limit=True)


def _of_waiting(engine: Any, run: RunConfig, rounds: int) -> list[Quantity]:
    """Seconds that training waits for a checkpoint, and until one in the background is on the disk."""
    waited, stalled, behind = [], [], []
    checkpointers = {
        is_async: Checkpointer(
            engine,
            replace(run, checkpoint=replace(run.checkpoint, async_save=is_async, keep_last=1)),
            lambda text: None,
        )
        for is_async in (False, True)
    }
    for iteration in range(0, 2 * rounds + 2, 2):
        for step, is_async in ((iteration, False), (iteration + 1, True)):
            checkpointer = checkpointers[is_async]
            use_checkpoint_engine(engine, checkpointer._files)
            os.sync()
            wait = _seconds(lambda: checkpointer.save(step))  # noqa: B023
            rest = _seconds(checkpointer.finish)
            if iteration == 0:
                continue
            if is_async:
                stalled.append(wait)
                behind.append(wait + rest)
            else:
                waited.append(wait)
    engine.checkpoint_engine = files = EngineFiles(copies=False)
    engine.save_checkpoint(run.checkpoint.save, tag="copied", save_latest=False)
    state = [content for _, content in files.take()]
    memory = tree_leaves(in_host_memory(state))
    memory = [leaf for leaf in memory if isinstance(leaf, Tensor)]
    what = f"--async-save: time that training waits; on disk after {median(behind):.2g} s"
    copied = [_seconds(lambda: in_host_memory(state, memory)) for _ in stalled]
    return [
        Quantity(what, "a synchronous save", stalled, waited, "s", most=STALL_GOAL),
        Quantity(what, "copying the state alone", stalled, copied, "s", is_limit=True),
    ]


def _mapped(path: Path) -> Any:
    """What torch itself makes of the file where it reads only tensors."""
    with torch.serialization.safe_globals(ALLOWED):
        return torch.load(path, weights_only=True, mmap=True)


def _tensors(item: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested containers, by the way to each."""
    if isinstance(item, Tensor):
        yield name, item
    elif isinstance(item, dict | list | tuple):
        for key, value in item.items() if isinstance(item, dict) else enumerate(item):
            yield from _tensors(value, f"{name}/{key}")


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _forget(file: Path) -> None:
    """Take a file that is on the disk out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
