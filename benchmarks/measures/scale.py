"""What grows with the world, for 8 to 16,384 ranks (1 to 2,048 hosts), measured on this machine.

One rank of the world starts with a process group in which the others do not exist, and a store that counts; hosts are
answered by a program in place of ssh; checkpoints have as many files as those of that many ranks, with a few bytes
each; data sets have real indices and sparse tokens. A row has the figure at the largest size, beside its goal, and the
exponent with which it grows from the second size on: 1 is in proportion.
"""

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
from deepspeed.launcher.multinode_runner import PDSHRunner
from deepspeed.launcher.runner import encode_world_info, parse_args

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import ROOT
from megatron.checkpoint import files, tracker
from megatron.checkpoint.collective_errors import gathered
from megatron.checkpoint.commit import begin_tag, commit_tag
from megatron.checkpoint.parameter_state import SavedStates
from megatron.checkpoint.run_file import RUN_FILE, SavedRun, describe
from megatron.checkpoint.saved_layout import model_file, optimizer_file
from megatron.cli import parse_run
from megatron.common.checkpoint_folders import MANIFEST, make_subfolder, rank_file_path
from megatron.config import CheckpointConfig, DataConfig, ModelConfig, ParallelConfig
from megatron.data.blend_order import BlendOrder
from megatron.data.datasets import build_datasets
from megatron.data.gpt2_dataset import SampleStream
from megatron.data.index_file import HEADER, MAGIC
from megatron.data.indexed_dataset import DocumentLengths, IndexedDataset
from megatron.data.map_cache import cached_epoch
from megatron.engines.pipelined_model import LayoutGrid
from megatron.launch.distributed import distributed, leave_store, rendezvous_barrier
from megatron.launch.watchdog import describe_hang
from megatron.model.architectures import architecture_of
from megatron.model.spec import parameter_prefix
from megatron.tools.cluster import probe, probe_hosts
from megatron.tools.cluster.doctor import HostState, examine_hosts, table
from megatron.tools.cluster.elastic import pick_hosts
from megatron.tools.cluster.hostfile import read_hostfile
from megatron.tools.cluster.launch_flags import chosen_hosts, read_launch
from megatron.tools.cluster.launching import launcher_arguments
from megatron.tools.convert.inspection import verify
from megatron.tools.one_rank import group, run

WORLDS = (8, 128, 1024, 4096, 16384)
DOCUMENTS = (10_000, 100_000, 1_000_000, 10_000_000)
BLENDS = (10, 100, 1_000, 10_000)
HOST = 8
"""Ranks of a host."""
LAYOUT = "TP 8 x PP 8"
Found = Mapping[str, tuple[float, str, float]]
"""Value, unit and goal by name."""


def measure(rounds: int) -> list[Quantity]:
    """Every figure at every size, once: they are counts, or far from their goals."""
    rows: list[Quantity] = []
    for what, sizes, step in (
        ("ranks", WORLDS, _start),
        ("ranks", WORLDS, _planned),
        ("ranks", WORLDS, _hosts),
        ("ranks", WORLDS, _checkpoint),
        ("ranks", WORLDS, _reshard),
        ("documents", DOCUMENTS, _index_maps),
        ("data sets", BLENDS, _blend),
        ("data sets", BLENDS, _data_sets),
    ):
        # In a process of its own, which holds no memory that another has freed.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            found = list(executor.map(partial(_in_a_folder, step), sizes))
        rows += [_row(name, what, sizes, [one[name] for one in found]) for name in found[0]]
    return rows


def _row(name: str, what: str, sizes: tuple[int, ...], found: list[tuple[float, str, float]]) -> Quantity:
    values = [value for value, _, _ in found]
    value, unit, goal = found[-1]
    growth = math.log(max(values[-1], 1e-9) / max(values[1], 1e-9)) / math.log(sizes[-1] / sizes[1])
    few = f"{values[1]:.3g} at {sizes[1]:,}, exponent {growth:.2f}"
    return Quantity(f"{name}, {sizes[-1]:,} {what} ({few})", "goal", [value], [goal], unit)


def _in_a_folder(step: Callable[[int, Path], Found], size: int) -> Found:
    with tempfile.TemporaryDirectory() as name:
        return step(size, Path(name))


def _parallel(world: int) -> ParallelConfig:
    return ParallelConfig(world_size=world, model_parallel_size=8, pipe_parallel_size=8 if world > HOST else 1)


def _start(world: int, _: Path) -> Found:
    """Rank 0 joins, and makes the groups that an engine with a pipeline needs."""
    counted: Counter[str] = Counter()

    class Counting(group.OneRankStore):
        def __getattribute__(self, name: str) -> Any:
            counted["operations"] += name in ("set", "get", "add", "wait", "check")
            return super().__getattribute__(name)

    def begin() -> tuple[float, int]:
        nobody = patch("megatron.launch.distributed.listen", lambda _: socket())  # connects
        with nobody, patch.object(run, "OneRankStore", Counting), run.one_rank(world, 0):
            counted.clear()
            began = time.perf_counter()
            leave_store(rendezvous_barrier(os.environ, timedelta(minutes=1)), os.environ)
            with distributed(_parallel(world)) as layout:
                LayoutGrid(layout, layout.pipeline_topology)
                layout.group_of_stages(sorted({0, layout.pipe_group.size() - 1}))
                seconds = time.perf_counter() - began
                received = patch.object(dist, "recv_object_list", lambda *_, **__: counted.update(received=1))
                with received:
                    gathered([])
                return seconds, len(dist.distributed_c10d._world.pg_map)

    seconds, groups = begin()
    tracemalloc.start()
    begin()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "start of a rank: layout and groups": (seconds, "s", 5.0),
        "start of a rank: groups made": (groups, "groups", 20.0),
        "save: ranks that send to rank 0": (float(counted["received"]), "ranks", 20.0),
        # A communicator that is not split from the world's sets or gets a key, and may do both.
        "start of a rank: store operations": (counted["operations"] + 2 * groups, "operations", 100.0),
        "start of a rank: peak memory of Python": (peak, "B", 64e6),
        "hang of one rank: report of rank 0": (_hang(world), "s", 1.0),
    }


def _hang(world: int) -> float:
    report = {"alarmed": True, "phases_entered": 3, "in_collective": True, "text": "training", "host": "a"}
    reports: list[dict | None] = [dict(report) for _ in range(world)]
    reports[world // 2] = None
    began = time.perf_counter()
    assert len(describe_hang(reports, "--watchdog-minutes", Path("/x"))) < 30
    return time.perf_counter() - began


def _planned(world: int, folder: Path) -> Found:
    """The planner's search and --explain, as programs."""
    model = "llama3.1-8b" if world == HOST else "llama3.1-405b"
    search = ["--model", model, "--device", "h100", "--devices", str(world), "--global-batch-size", str(2 * world)]
    layout = ["--model-parallel-size", "8", *(["--pipe-parallel-size", "8"] if world > HOST else [])]
    explain = [
        "--model-preset",
        model,
        *layout,
        "--lr",
        "0.1",
        "--seq-length",
        "8192",
        "--mock-data",
        "--global-batch-size",
        str(2 * world),
        "--train-iters",
        "10",
    ]
    found = {}
    for name, command, goal in (
        ("tools/plan.py", ["tools/plan.py", *search], 60.0),
        ("--explain", ["pretrain_gpt2.py", *explain, "--explain"], 5.0),
    ):
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, "WORLD_SIZE": str(world)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait() in (0, 1), errors[-2000:]
        found[f"{name}: seconds"] = (time.perf_counter() - began, "s", goal)
    return found


def _hosts(world: int, folder: Path) -> Found:
    """The hostfile, the launcher's checks, the doctor with a program in place of ssh, the elastic agent's choice."""
    hosts = max(world // HOST, 2)
    file = folder / "hostfile"
    file.write_text("".join(f"host-{number} slots={HOST}\n" for number in range(hosts)))
    words = ["--hostfile", str(file), "--launcher", "openmpi", "pretrain_gpt2.py"]
    began = time.perf_counter()
    launcher_arguments(read_launch(words), {"DS_ACCELERATOR": "cpu"})
    launcher = time.perf_counter() - began
    chosen = chosen_hosts(read_launch(words))
    with _ssh_answers(folder):
        began = time.perf_counter()
        results, _ = examine_hosts(
            probe_hosts.Examination(chosen, None, None, "cpu", dict(os.environ), True, "", 29500, None, 60)
        )
        lines = table(results, color=False).splitlines()
        doctor = time.perf_counter() - began
    states = [HostState(host, "lost" if number % 100 == 1 else None) for number, host in enumerate(chosen)]
    began = time.perf_counter()
    assert len(pick_hosts(read_hostfile(file), states)) < hosts
    elastic = time.perf_counter() - began
    return {
        "hostfile and launcher's checks": (launcher, "s", 5.0),
        **(_start_by_pdsh(file, hosts, folder) if shutil.which("pdsh") else {}),
        "tools/doctor.py, hosts that answer at once": (doctor, "s", 60.0),
        "tools/doctor.py, lines": (float(len(lines)), "lines", 100.0),
        "elastic agent: choice of hosts": (elastic, "s", 1.0),
    }


def _start_by_pdsh(file: Path, hosts: int, folder: Path) -> Found:
    """DeepSpeed's command with a program in place of ssh, which cannot reach host 1."""
    words = launcher_arguments(read_launch(["--hostfile", str(file), "x.py"]), {"DS_ACCELERATOR": "cpu"})
    names = {f"host-{number}": list(range(HOST)) for number in range(hosts)}
    deepspeed = PDSHRunner(parse_args(words), encode_world_info(names))
    command, _, environ = deepspeed.get_cmd(dict(os.environ), names)
    (folder / "ssh").write_text(
        '#!/bin/sh\nfor word; do case "$word" in host-*) host=$word;; esac; done\n'
        "[ $host = host-1 ] && exit 255\nsleep 5\necho started\n"
    )
    (folder / "ssh").chmod(0o755)
    environ["PATH"] = f"{folder}:{environ['PATH']}"
    began = time.perf_counter()
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    assert "host-1: ssh exited with exit code 255" in ended.stderr, ended.stderr[-1000:]
    return {
        "pdsh: all hosts start, at once, and end after 5 s": (seconds, "s", 300.0),
        "pdsh: hosts that do not answer because of another": (
            hosts - 1.0 - ended.stdout.count("started"),
            "hosts",
            1.0,
        ),
    }


@contextmanager
def _ssh_answers(folder: Path) -> Iterator[None]:
    """While inside, ``ssh`` is a program that gives every host's answer at once."""
    facts = probe_hosts.probe_local_host({"project": str(ROOT), "files": {}, "folders": {}, "data": [], "environ": {},
                                          "port": None, "leftovers": None}, 60).facts  # fmt: skip
    (folder / "answer").write_text(probe.MARK + json.dumps(facts) + "\n")
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\ncat > /dev/null\ncat {folder}/answer\n")
    ssh.chmod(0o755)
    with patch.dict(os.environ, {"PATH": f"{folder}:{os.environ['PATH']}"}):
        yield


def _checkpoint(world: int, folder: Path) -> Found:
    """A checkpoint with the files of ``world`` ranks: committed, read by a resume, verified, and removed."""
    parallel = _parallel(world)
    words = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 16 --max-position-embeddings 16"
    words += f" --mock-data --vocab-size 128 --train-iters 9 --lr 0.1 --zero-stage 1 --global-batch-size {world}"
    words += f" --model-parallel-size 8 --pipe-parallel-size {parallel.pipe_parallel_size}"
    run = parse_run(words.split(), {"WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"})
    run = replace(run, model=replace(run.model, vocab_size=128, padded_vocab_size=1024))
    described = describe(run, 1, (), ()) | {"has_optimizer": False}  # whose files have no content
    names = [f"rng_state_{rank:05d}.pt" for rank in range(world)]
    replicas = parallel.data_parallel_size
    names += [f"zero_pp_rank_{number}_mp_rank_{rank:02d}_optim_states.pt" for number in range(replicas)
              for rank in range(world // replicas)]  # fmt: skip
    path = begin_tag(folder, tracker.tag_name(1))
    (path / RUN_FILE).write_text(json.dumps(described))
    _write_weights(path, run.model, parallel.pipe_parallel_size)
    records = {file.name: files.record_of(file) for file in path.iterdir()}
    folders = Counter({path: len(records)})
    for name in names:
        file = rank_file_path(path / name, world)
        make_subfolder(file, path)
        file.write_bytes(name.encode())
        records[file.relative_to(path).as_posix()] = files.record_of(file)
        folders[file.parent] += 1
    began = time.perf_counter()
    commit_tag(folder, 1, records, CheckpointConfig())
    commit = time.perf_counter() - began
    began = time.perf_counter()
    saved = tracker.newest(folder)
    resume = time.perf_counter() - began
    began = time.perf_counter()
    verify(saved.path)
    verified = time.perf_counter() - began
    size = (saved.path / MANIFEST).stat().st_size
    inspected = _seconds_of("tools/inspect_checkpoint.py", str(saved.path))
    merged = _seconds_of("tools/convert_checkpoint.py", "merge", str(saved.path), "--output", str(folder / "merged"))
    begin_tag(folder, tracker.tag_name(2))
    began = time.perf_counter()
    commit_tag(folder, 2, {}, CheckpointConfig(keep_last=1))
    pruned = time.perf_counter() - began
    assert not saved.path.exists()
    return {
        "checkpoint: tools/inspect_checkpoint.py": (inspected, "s", 120.0),
        "checkpoint: tools/convert_checkpoint.py merge": (merged, "s", 120.0),
        "checkpoint: files in its largest folder": (float(max(folders.values())), "files", 4000.0),
        "checkpoint: manifest": (float(size), "B", 20e6),
        "checkpoint: rank 0 commits": (commit, "s", 10.0),
        "checkpoint: a rank reads manifest and sizes": (resume, "s", 10.0),
        "checkpoint: verify, of tiny files": (verified, "s", 60.0),
        "checkpoint: --keep-last removes it": (pruned, "s", 60.0),
    }


def _write_weights(path: Path, config: ModelConfig, stages: int) -> None:
    """The pipeline engine's files of weights of 8 tensor-parallel ranks."""
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, spec in architecture_of(config).named_parameters(config).items():
        shard = torch.zeros(_local(spec.shape, spec.shard_dim))
        for index, layer in enumerate(architecture_of(config).layers(config)):
            if (inner := name.removeprefix(parameter_prefix(index, layer))) != name:
                parts[f"layer_{index:02d}-model"][inner] = shard
    for rank in range(8):
        for layer, content in parts.items():
            torch.save(content, path / f"{layer}_{rank:02d}-model_states.pt")
    for rank in range(8 * stages):
        torch.save({"checkpoint_version": 3.0}, path / f"mp_rank_{rank:02d}_model_states.pt")


def _seconds_of(*command: str) -> float:
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return time.perf_counter() - began


def _reshard(world: int, folder: Path) -> Found:
    """Bytes that the first rank of half and of twice as many reads of a checkpoint of ``world``, by what it needs.

    There are only the files that it can need: those of the first stage's first shard, and one of each other stage.
    """
    parallel, hidden = _parallel(world), 4096
    words = f"--num-layers 8 --hidden-size {hidden} --num-attention-heads 16 --seq-length 16 --vocab-size 128"
    words += " --max-position-embeddings 16 --mock-data --train-iters 9 --lr 0.1 --zero-stage 1"
    words += f" --global-batch-size {world} --model-parallel-size 8 --pipe-parallel-size {parallel.pipe_parallel_size}"
    run = parse_run(words.split(), {"WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"})
    saved = SavedRun(folder.parent, folder.name, describe(run, 1, (), ()))
    specs = {
        name: spec for name, spec in architecture_of(run.model).named_parameters(run.model).items() if name[:2] == "2."
    }
    shapes = {name: _local(spec.shape, spec.shard_dim) for name, spec in specs.items()}
    ranks, numel = parallel.data_parallel_size, sum(map(math.prod, shapes.values()))
    for stage in range(max(parallel.pipe_parallel_size, 1)):
        groups = [{name: torch.Size(shape) for name, shape in shapes.items()}] if stage == 0 else [{}]
        torch.save({"param_shapes": groups}, model_file(folder, saved.layout, stage * 8))
    flat = torch.zeros(-(-numel // ranks))
    for rank in range(ranks):
        base = {"state": {0: {"exp_avg": flat, "exp_avg_sq": flat.clone()}}, "param_groups": [{"params": [0]}]}
        content = {"single_partition_of_fp32_groups": [flat.clone()], "base_optimizer_state": base}
        torch.save({"optimizer_state_dict": content}, optimizer_file(folder, saved.layout, rank, 0))
    found = {}
    for name, factor in (("half", 0.5), ("twice", 2)):
        part = min(int(numel / ranks / factor), numel)
        before, began = _bytes_read(), time.perf_counter()
        states, at = SavedStates(saved, verified=True), 0
        for parameter, shape in shapes.items():
            state, size = states.shard(parameter, shape, 0, 8), math.prod(shape)
            state["fp32"].read(0, size)
            for key in ("exp_avg", "exp_avg_sq"):
                if 0 < (end := min(part - at, size)):
                    state[key].read(0, end)
            at += size
        found[f"resharding to {name} as many ranks: bytes read by bytes needed"] = (
            (_bytes_read() - before) / (4 * (numel + 2 * part)), "times", 1.2,
        )  # fmt: skip
        found[f"resharding to {name} as many ranks: one rank"] = (time.perf_counter() - began, "s", 60.0)
    return found


def _local(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return tuple(size // 8 if number == dim else size for number, size in enumerate(shape))


def _bytes_read() -> int:
    """Bytes that this process has read with system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _index_maps(documents: int, folder: Path) -> Found:
    """A data set with an index of so many documents of 1,000 to 4,000 tokens, whose tokens are a hole in a file."""
    _write_data_set(folder / "x", documents)
    memory: list[int] = []
    ended = threading.Event()
    watch = threading.Thread(target=_watch_memory, args=(memory, ended))
    watch.start()
    began = time.perf_counter()
    indexed = IndexedDataset(folder / "x", cache=folder)
    opened = time.perf_counter() - began
    stream = SampleStream(DocumentLengths(indexed, range(documents)), 4096, 1)

    def read() -> float:
        began = time.perf_counter()
        cached_epoch(folder, "maps", stream.recipe(0), 0)
        return time.perf_counter() - began

    built = read()
    ended.set()
    watch.join()
    began = time.perf_counter()
    IndexedDataset(folder / "x", cache=folder)
    return {
        "data set: checked and opened": (opened, "s", 60.0),
        "data set: opened by a later rank": (time.perf_counter() - began, "s", 1.0),
        "index maps of an epoch: build": (built, "s", 60.0),
        "index maps of an epoch: read by a later rank": (read(), "s", 1.0),
        "index maps: memory besides files": (float(max(memory) - memory[0]), "B", 1e9),
    }


def _write_data_set(prefix: Path, documents: int) -> None:
    """Some documents at a time: an index can be larger than memory."""
    random, tokens = np.random.default_rng(1), 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, documents, documents + 1))
        for begin in range(0, documents, 1 << 16):
            sizes = random.integers(1000, 4000, min(1 << 16, documents - begin), dtype=np.int32)
            ends = np.cumsum(sizes, dtype=np.int64) + tokens
            bounds = np.arange(begin, begin + len(sizes) + 1, dtype=np.int64)
            for place, array in ((4 * begin, sizes), (4 * documents + 8 * begin, (ends - sizes) * 4),
                                 (12 * documents + 8 * begin, bounds)):  # fmt: skip
                file.seek(HEADER.size + place)
                file.write(array.data)
            tokens = int(ends[-1])
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(tokens * 4)


def _watch_memory(found: list[int], ended: threading.Event) -> None:
    """Record the bytes that are no pages of files, of this process and those that it forks, until ``ended``."""
    while not found or not ended.wait(0.02):
        own, *others = (_anonymous(process.pid) for process in (psutil.Process(), *psutil.Process().children()))
        found.append(own + sum(max(other - found[0], 0) for other in others))


def _anonymous(pid: int) -> int:
    with suppress(OSError, StopIteration):  # it has ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
    return 0


def _data_sets(parts: int, folder: Path) -> Found:
    """Opening a blend of data sets of 20,000 documents, links to one, without maps and with them."""
    _write_data_set(folder / "0", 20_000)
    for number in range(1, parts):
        for ending in ("bin", "idx"):
            os.link(folder / f"0.{ending}", folder / f"{number}.{ending}")

    def start(count: int) -> tuple[float, int, int]:
        names = [word for number in range(count) for word in (str(number + 1), str(folder / str(number)))]
        data = DataConfig(data_path=tuple(names), seq_length=4096)
        began = time.perf_counter()
        opened = build_datasets(data, {"train": 1000}, vocab_size=1 << 31, seed=1)
        seconds, files = time.perf_counter() - began, psutil.Process().num_fds()
        assert opened.train is not None
        return seconds, files, len(Path("/proc/self/maps").read_text().splitlines())

    first, _, _ = start(parts)
    later, files, mapped = start(parts)
    return {
        "blend: first start, by one process": (first, "s", 3600.0),
        "blend: start of a later rank": (later, "s", 60.0),
        "blend: open files of a later rank": (float(files), "files", 1024.0),
        "blend: parts of its memory that are mapped": (float(mapped), "parts", 65530.0),
    }


def _blend(parts: int, _: Path) -> Found:
    """The order of the first 1,048,576 samples of a blend with weights that all differ."""
    total = parts * (parts + 1) // 2
    began = time.perf_counter()
    order = BlendOrder(tuple(Fraction(number + 1, total) for number in range(parts)), 1 << 20)
    seconds = time.perf_counter() - began
    assert {order[number][0] for number in range(parts)} != {0}
    return {"blend: the order of a million samples": (seconds, "s", 30.0)}
