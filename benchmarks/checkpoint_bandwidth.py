"""How fast checkpoints are saved and loaded on this machine, and how long training waits for them.

    DS_ACCELERATOR=cpu python benchmarks/checkpoint_bandwidth.py --folder /the/disk/in/question

One process holds a GPT-2 with Adam's state, in fp32. Its files are written and read in four ways in turn, round after
round, so that whatever else the machine does meets all of them alike:

    suite       torch.save with SHA-256 and fsync; SHA-256 compared and torch.load of nothing but tensors
    torch       torch.save and torch.load, which run code and leave the disk to the system
    torch+sync  torch.save and fsync
    raw         the bytes of one such checkpoint, written from memory, and fsync; read

Reading begins with a cold page cache. Then the same engine saves with and without --async-save: what counts is the time
until training may go on. Figures are medians, with the least and the largest.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.arguments import parse_run  # noqa: E402
from megatron.cli import ToolParser, run_tool  # noqa: E402
from megatron.config import RunConfig  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402

Times = dict[str, list[float]]
"""Seconds of each round, by way."""


def main() -> None:
    """Build the engine, measure, print."""
    arguments = _parser().parse_args()
    folder = Path(arguments.folder) / f"checkpoint_bandwidth.{os.getpid()}"
    run = _run(arguments, folder)
    prepare_environment(os.environ)

    import torch

    from megatron.engine import build_engine
    from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
    from megatron.mpu.layout import distributed
    from megatron.mpu.random import model_parallel_manual_seed

    silence_known_warnings()
    try:
        with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
            model_parallel_manual_seed(1, layout)
            engine = build_engine(run, layout)
            tokens = torch.zeros(1, run.data.seq_length, dtype=torch.long)  # [b, s]
            engine.backward(engine(tokens, (tokens, torch.full(tokens.shape, 1 / tokens.numel()))))
            engine.step()
            size, written, read = _measure_files(engine, run, folder, arguments.rounds)
            waits = _measure_waits(engine, run, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"a checkpoint of {size / 1e6:,.0f} MB, {arguments.rounds} rounds, {os.cpu_count()} CPU cores, {folder.parent}"
    )
    print(_table("MB/s, save", {way: [size / 1e6 / s for s in times] for way, times in written.items()}))
    print(_table("MB/s, load", {way: [size / 1e6 / s for s in times] for way, times in read.items()}))
    print(_table("seconds", waits))
    if arguments.json:
        figures = {"bytes": size, "save_seconds": written, "load_seconds": read, "wait_seconds": waits}
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


def _run(arguments: argparse.Namespace, folder: Path) -> RunConfig:
    words = "--num-attention-heads 8 --seq-length 64 --batch-size 1 --train-iters 10 --lr 1e-4".split()
    words += ["--num-layers", str(arguments.layers), "--hidden-size", str(arguments.hidden_size)]
    words += ["--data-path", "none", "--vocab-file", "none", "--merge-file", "none", "--save", str(folder)]
    run = parse_run(words, os.environ)
    return replace(run, model=replace(run.model, vocab_size=1024, padded_vocab_size=1024))


def _measure_files(engine: Any, run: RunConfig, folder: Path, rounds: int) -> tuple[int, Times, Times]:
    """Bytes of a checkpoint, and the seconds to write and to read it in each way."""
    import torch

    from megatron.checkpoint.durable import sync
    from megatron.checkpoint.engine_files import EngineFiles
    from megatron.checkpoint.files import read_file, write_file
    from megatron.checkpoint.manifest import write_manifest

    engine.checkpoint_engine = files = EngineFiles(copies=True)
    engine.save_checkpoint(str(folder), tag="measured", save_latest=False)
    ((file, state),) = files.take()

    def write_suite() -> None:
        write_manifest(file.parent, {file.name: write_file(file, state)})

    def write_synced() -> None:
        torch.save(state, file)
        sync(file)

    def write_raw() -> None:
        with open(file, "wb") as raw:
            raw.write(content)
        sync(file)

    writers: dict[str, Callable[[], Any]] = {
        "suite": write_suite,
        "torch": lambda: torch.save(state, file),
        "torch+sync": write_synced,
        "raw": write_raw,
    }
    readers: dict[str, Callable[[], Any]] = {
        "suite": lambda: read_file(file),
        "torch": lambda: torch.load(file, weights_only=False),
        "raw": file.read_bytes,
    }
    write_suite()
    content = file.read_bytes()
    written: Times = {way: [] for way in writers}
    read: Times = {way: [] for way in readers}
    for number in range(rounds):
        for way, write in _rotated(writers, number):
            shutil.rmtree(file.parent)
            file.parent.mkdir()
            os.sync()
            written[way].append(_seconds(write))
        shutil.rmtree(file.parent)
        file.parent.mkdir()
        write_suite()
        for way, load in _rotated(readers, number):
            _forget(file)
            read[way].append(_seconds(load))
    shutil.rmtree(file.parent)
    return len(content), written, read


def _measure_waits(engine: Any, run: RunConfig, rounds: int) -> Times:
    """Seconds that training waits for a checkpoint, and until one in the background is on the disk."""
    from megatron.checkpoint.saving import Checkpointer

    waits: Times = {"save": [], "--async-save": [], "--async-save, until written": []}
    for iteration in range(1, 2 * rounds + 1, 2):
        for step, is_async in ((iteration, False), (iteration + 1, True)):
            checkpoint = replace(run.checkpoint, async_save=is_async, keep_last=1)
            checkpointer = Checkpointer(engine, replace(run, checkpoint=checkpoint), lambda text: None)
            os.sync()
            wait = _seconds(lambda: checkpointer.save(step))  # noqa: B023
            rest = _seconds(checkpointer.finish)
            if is_async:
                waits["--async-save"].append(wait)
                waits["--async-save, until written"].append(wait + rest)
            else:
                waits["save"].append(wait)
    return waits


def _rotated(ways: dict[str, Callable[[], Any]], number: int) -> list[tuple[str, Callable[[], Any]]]:
    """``ways`` from another one on in each round, so that none is always the one behind the same."""
    items = list(ways.items())
    start = number % len(items)
    return items[start:] + items[:start]


def _seconds(step: Callable[[], Any]) -> float:
    start = time.monotonic()
    step()
    return time.monotonic() - start


def _forget(file: Path) -> None:
    """Take a file that is on the disk out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _table(title: str, figures: dict[str, list[float]]) -> str:
    digits = 2 if title == "seconds" else 0
    rows = [f"\n{title:28} {'median':>8} {'least':>8} {'largest':>8}"]
    for way, values in figures.items():
        columns = (statistics.median(values), min(values), max(values))
        rows.append(f"{way:28} " + " ".join(f"{value:8.{digits}f}" for value in columns))
    return "\n".join(rows)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("--folder", required=True, metavar="DIR", help="folder on the disk to measure")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="transformer layers")
    parser.add_argument("--hidden-size", type=int, default=512, metavar="N", help="size of the hidden states")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="measurements of each way")
    parser.add_argument("--json", metavar="FILE", help="write the seconds of each round there, too")
    return parser


if __name__ == "__main__":
    run_tool(main)
