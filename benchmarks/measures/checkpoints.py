"""Speed of saving and loading checkpoints, compared with the disk and other formats; how long saves block training.

One process holds a GPT-2 with Adam's state in fp32; its file is written and read by several methods in alternation.
This project writes with torch.save, xxHash and fsync; it verifies a hash and reads only tensors. Every loading
method ends with the state in the original tensors, as a resume does. Then the same engine saves synchronously, with
--async-save and with --snapshot-interval, measuring the time until training can continue; the first saves of each kind
are not counted. The disk is that of TMPDIR.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.comparing import Comparison, Quantity, Result, Seconds, alternate, timed
from benchmarks.measures.shapes import Shape
from benchmarks.measures.suite import run_of
from megatron.checkpoint.engine_files import EngineFiles, HostCopies
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.snapshots import Snapshots
from megatron.checkpoint.tensor_files import read_file, write_file
from megatron.common.files import sync
from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.build import build_engine
from megatron.engines.engine import train_batch
from megatron.launch.distributed import distributed
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.training.learning_rates import annealing_lr

SHAPE = Shape(layers=12, hidden=512, heads=8, sequence=64, batch=1, vocabulary=1024)
NOT_COUNTED = 2
"""Snapshots take new memory for the first two."""


def measure(rounds: int) -> list[Result]:
    """Saving, loading, and waiting."""
    silence_known_warnings()
    with tempfile.TemporaryDirectory() as name:
        run = run_of(SHAPE, "--save", str(Path(name) / "run"))
        with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
            model_parallel_manual_seed(1, layout)
            engine = build_engine(run, layout, annealing_lr(run))
            tokens = torch.zeros(SHAPE.batch, SHAPE.sequence, dtype=torch.long)  # [b, s]
            train_batch(engine, iter([Batch(tokens, (tokens, torch.full(tokens.shape, 1 / tokens.numel())))]))
            return [*_of_files(engine, Path(name) / "files", rounds), *_of_waiting(engine, run, rounds)]


def _of_files(engine: Any, folder: Path, rounds: int) -> list[Comparison]:
    engine.checkpoint_engine = files = EngineFiles(HostCopies())
    engine.save_checkpoint(str(folder), tag="measured", save_latest=False)
    ((path, state),) = files.take()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, state)
    file.write_suite()
    content = path.read_bytes()
    writers: dict[str, Callable[[], Any]] = {
        "suite": file.write_suite,
        "raw bytes and fsync": lambda: (path.write_bytes(content), sync(path)),
        "safetensors and fsync": file.write_safetensors,
        "torch.save and fsync": lambda: (torch.save(state, path), sync(path)),
    }
    written = alternate({name: partial(file.time, write) for name, write in writers.items()}, rounds)
    file.clear()
    file.write_suite()
    file.write_safetensors()
    readers = {
        "suite": lambda: file.take(_tensors(read_file(path))),
        "safetensors": lambda: file.take(load_file(file.other).items()),
        "torch.load": lambda: file.take(_tensors(torch.load(path, weights_only=False))),
    }
    read, size = alternate(readers, rounds), len(content)
    return [
        Comparison(f"{what}: a checkpoint of {size / 1e6:,.0f} MB", peer, times["suite"], theirs, size, "B")
        for what, times in (("save", written), ("load", read))
        for peer, theirs in times.items()
        if peer != "suite"
    ]


class _File:
    """One checkpoint's file, written in several ways."""

    def __init__(self, path: Path, state: Any):
        self.path, self.state = path, state
        self.tensors = {name: tensor.contiguous() for name, tensor in _tensors(state)}
        self.other = path.with_suffix(".safetensors")
        self.into = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}

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

    def write_safetensors(self) -> None:
        save_file(self.tensors, self.other)
        sync(self.other)

    def take(self, tensors: Any) -> None:
        """Copy the tensors that were read to where the state is wanted."""
        for name, tensor in tensors:
            self.into[name].copy_(tensor)


def _of_waiting(engine: Any, run: RunConfig, rounds: int) -> list[Quantity]:
    """Seconds that training waits for a checkpoint in the background and for a snapshot, beside a synchronous save."""

    def checkpointer(**settings: Any) -> Checkpointer:
        checkpoint = replace(run.checkpoint, keep_last=1, **settings)
        return Checkpointer(engine, replace(run, checkpoint=checkpoint), lambda text: None)

    now, behind = checkpointer(), checkpointer(async_save=True)
    now.prepare()
    with_snapshots = replace(run, checkpoint=replace(run.checkpoint, snapshot_interval=1, keep_last=1))
    snapshots = Snapshots(now, with_snapshots, lambda text: None)
    savers = {"--snapshot-interval": snapshots, "": now, "--async-save": behind}
    waited: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(rounds + NOT_COUNTED):
        for place, (name, saver) in enumerate(savers.items()):
            step = len(savers) * number + place + 1
            os.sync()
            if isinstance(saver, Checkpointer):
                engine.checkpoint_engine = saver._files
            begin = time.perf_counter()
            saver.take(step) if isinstance(saver, Snapshots) else saver.save(step)
            waited[name].append(time.perf_counter() - begin)
            saver.finish()
    snapshots.remove()
    synchronous, peer = waited.pop("")[NOT_COUNTED:], "a synchronous save"
    return [
        Quantity(f"{name}: time that training waits", peer, seconds[NOT_COUNTED:], synchronous, "s")
        for name, seconds in waited.items()
    ]


def _tensors(item: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested containers, by the way to each."""
    if isinstance(item, Tensor):
        yield name, item
    elif isinstance(item, dict | list | tuple):
        for key, value in item.items() if isinstance(item, dict) else enumerate(item):
            yield from _tensors(value, f"{name}/{key}")
