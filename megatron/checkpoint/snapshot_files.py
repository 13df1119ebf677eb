"""Snapshots: checkpoints in the memory of the hosts of a run, for ``--snapshot-interval``. No torch here.

Every K iterations each rank writes the files of an ordinary checkpoint into a folder in its host's memory (a tmpfs such
as /dev/shm), which survives the process, and sends them in the background to a rank of the next host. So the state is
complete as long as no two consecutive hosts, in the order of ranks, are lost. The next start of the run looks for
snapshots in the memory of its hosts. If all shards of a snapshot are found that is newer than the newest checkpoint on
disk, the ranks write it to the checkpoint folder, and it is loaded like any other checkpoint, on any layout.

    DIR/megatron-ID/START/ITERATION/FILES            the files of this host's ranks, and copies of the previous host's
    DIR/megatron-ID/START/ITERATION/rank_00003.json  written last: rank 3's files are complete; their sizes and hashes
    SAVE/.snapshots                                  START: only snapshots of the newest start are valid
    SAVE/.memory-of-HOST                             megatron-ID of a host that the elastic agent leaves idle

ID is a hash of the path of ``--save``, the same on all hosts. A snapshot is removed when the next one is complete, so
that a failure in between loses nothing. A shard with a wrong hash counts as lost, and so does a snapshot of another
start, which may have another layout, or samples that were skipped later. None is used if ``latest`` names an older
checkpoint than when it was taken: the user has gone back.
"""

import hashlib
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.files import FILE_OVERHEAD, replace_text
from megatron.common.errors import CheckpointError, ResourceError, counted
from megatron.common.formats import with_prefix
from megatron.common.processes import machine_id
from megatron.common.reading import read_bytes, read_json, type_problem
from megatron.config import CheckpointConfig, RunConfig
from megatron.model.partition import Stage, plan
from megatron.model.spec import is_trained_in
from megatron.parallel import AXES, axis_sizes

START_FILE = ".snapshots"
_SNAPSHOTS = 2
"""Number of snapshots in memory at the same time, while one replaces the other."""
_BROUGHT = ".memory-of-"

Files = dict[str, tuple[int, str]]
"""(size in bytes, ``Record.xxh128``) by file name."""
Place = tuple[int, str, int]
"""Location of a copy of a shard: the first rank of the host, the folder, and the rank that took the shard."""


class Shard(NamedTuple):
    """The files of one rank of a snapshot, in the memory of a host."""

    iteration: int
    rank: int
    ranks: int
    """Number of ranks of the run that took the snapshot."""
    files: Files
    folder: str
    host: int = 0
    """The host, as its first rank in the run that looks for snapshots."""
    latest: int = 0
    """The iteration of the newest checkpoint when it was taken; 0 if unknown, as on ranks other than 0."""

    @property
    def size(self) -> int:
        """Total bytes of the files."""
        return sum(size for size, _ in self.files.values())

    @property
    def place(self) -> Place:
        """Location of this copy of the shard."""
        return self.host, self.folder, self.rank


def snapshot_folder(config: CheckpointConfig) -> Path:
    """The folder of a run's snapshots on this host."""
    identity = hashlib.sha256(str(Path(config.save or "").resolve()).encode()).hexdigest()[:16]
    return Path(config.snapshot_dir).absolute() / f"megatron-{identity}"


def brought_folder(save: Path, host: str) -> Path:
    """The folder on disk to which the snapshots of a host are moved that does not take part in the next start."""
    return save / f"{_BROUGHT}{host}"


def brought_folders(save: Path) -> list[Path]:
    """All existing folders of ``brought_folder``."""
    return sorted(save.glob(f"{_BROUGHT}*"))


def this_host() -> str:
    """A unique name of this host in the run."""
    return f"{socket.gethostname()} {machine_id()}"


def read_start(save: Path) -> str:
    """Identifier of the newest start with snapshots of the run that saves into ``save``; empty if there is none."""
    with suppress(OSError, UnicodeDecodeError):
        start = read_bytes(save / START_FILE).decode().strip()
        return start if start.isalnum() else ""  # it becomes part of a pattern
    return ""


def make_start_folder(folder: Path, start: str) -> None:
    """Remove the snapshots of other starts, and create an empty folder for the snapshots of ``start``.

    Raises CheckpointError if ``folder`` belongs to another user, or cannot be made.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        status = folder.lstat()
        if status.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
            raise CheckpointError(f"--snapshot-dir: {folder} is not a folder of this user: remove it")
        for earlier in folder.iterdir():
            shutil.rmtree(earlier)
        (folder / start).mkdir(0o700)
    except OSError as error:
        raise CheckpointError(f"--snapshot-dir: {folder} cannot be prepared ({error.strerror})") from error


def write_marker(shard: Shard, folder: Path) -> None:
    """Mark the files of ``shard`` in ``folder`` as complete."""
    replace_text(folder / f"rank_{shard.rank:05d}.json", json.dumps({**shard._asdict(), "folder": str(folder)}))


def read_shards(folder: Path, start: str) -> list[Shard]:
    """The complete shards of ``start`` in the snapshot folder of this host; hashes are not compared.

    Folders of other users, and files that are not of a shard, are ignored.
    """
    found = []
    for path in sorted(folder.glob(f"{start}/*/rank_*.json")) if start else ():
        with suppress(OSError, ValueError):
            content = read_json(path)
            if path.stat().st_uid != os.getuid() or type_problem(Shard, content):
                continue
            files = {name: (size, digest) for name, (size, digest) in content["files"].items()}
            shard = Shard(**{**content, "files": files, "folder": str(path.parent)})
            is_whole = all("/" not in name and (path.parent / name).stat().st_size == files[name][0] for name in files)
            if is_whole and 0 <= shard.rank < shard.ranks:
                found.append(shard)
    return found


def copy_holders(hosts: Sequence[str]) -> dict[int, int]:
    """For each rank the rank of the next host that keeps a copy of its shard; empty for a single host.

    ``hosts`` has the host of each rank. The copies of a host are distributed over the ranks of the next one.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    groups = list(ranks_of.values())
    if len(groups) == 1:
        return {}
    return {
        rank: holders[position % len(holders)]
        for ranks, holders in zip(groups, groups[1:] + groups[:1], strict=True)
        for position, rank in enumerate(ranks)
    }


def newest_complete(
    found: Iterable[Shard], after: int, broken: Collection[Place] = ()
) -> dict[int, list[Shard]] | None:
    """The newest complete snapshot in ``found``, if it is newer than iteration ``after``.

    Shards at locations in ``broken`` are ignored. Returns the copies of each shard by the rank that took it.
    """
    snapshots: dict[tuple[int, int], dict[int, list[Shard]]] = {}
    for shard in found:
        if shard.iteration > after and shard.place not in broken:
            snapshots.setdefault((shard.iteration, shard.ranks), {}).setdefault(shard.rank, []).append(shard)
    complete = [key for key, shards in snapshots.items() if len(shards) == key[1]]
    return snapshots[max(complete)] if complete else None


def divide(snapshot: Mapping[int, Sequence[Shard]], hosts: Sequence[str]) -> dict[int, list[Shard]]:
    """Distribute the shards of a snapshot over ranks of the hosts that have them, with balanced numbers of bytes."""
    load: Counter[int] = Counter()
    work: dict[int, list[Shard]] = {}
    for _, copies in sorted(snapshot.items()):
        options = [
            (load[rank], rank, number)
            for number, shard in enumerate(copies)
            for rank, host in enumerate(hosts)
            if host == hosts[shard.host]
        ]
        _, rank, number = min(options)
        load[rank] += copies[number].size
        work.setdefault(rank, []).append(copies[number])
    return work


_MOMENTS = 8
"""Bytes of Adam's two moments of a parameter."""


def planned_bytes(run: RunConfig) -> list[int]:
    """Approximate bytes of each rank's files of a checkpoint with Adam; other optimizers may need fewer."""
    weight = 4 if run.precision.dtype == "fp32" else 2
    owners = run.parallel.data_parallel_size * run.parallel.sequence_ranks
    counts = [_counts(run, stage) for stage in plan(run)]
    sizes = []
    for place in product(*map(range, axis_sizes(run.parallel).values())):
        at = dict(zip(AXES, place, strict=True))
        numel, trained, expert = counts[at["pipe"]]
        writes_weights = at["data"] == at["sequence"] == 0
        if run.zero.zero_stage == 0:
            size = writes_weights * (numel * weight + trained * _MOMENTS)
        else:
            weights = 0 if run.zero.zero_stage == 3 else numel * weight
            size = writes_weights * weights + trained * (4 + _MOMENTS) // owners
        if 0 < at["data"] < run.parallel.expert_model_parallel_size and at["sequence"] == 0:
            size += expert * (weight + (0 if run.zero.zero_stage else _MOMENTS))
        sizes.append(size + FILE_OVERHEAD)
    return sizes


def _counts(run: RunConfig, stage: Stage) -> tuple[int, int, int]:
    """Numbers of all, of trained and of experts' parameter elements on a tensor-parallel rank of ``stage``."""
    t, experts = run.parallel.model_parallel_size, run.parallel.expert_model_parallel_size
    rows = [
        (spec.local_numel(t, experts), is_trained_in(run.model, layer.part, spec.name), spec.is_expert)
        for layer in stage.distinct_layers()
        for spec in layer.parameters
    ]
    trained = sum(numel for numel, is_trained_one, _ in rows if is_trained_one)
    return sum(row[0] for row in rows), trained, sum(numel for numel, _, is_expert in rows if is_expert)


def planned_host_bytes(run: RunConfig, ranks_on_host: int) -> int:
    """Maximum bytes of snapshots on a host with ``ranks_on_host`` ranks.

    There are two snapshots, each with the host's shards and, with several hosts, copies of the previous host's shards.
    """
    sizes = planned_bytes(run)
    host_sizes = [sum(sizes[first : first + ranks_on_host]) for first in range(0, len(sizes), ranks_on_host)]
    copies = host_sizes[-1:] + host_sizes[:-1] if len(host_sizes) > 1 else [0]
    return _SNAPSHOTS * max(own + copy for own, copy in zip(host_sizes, copies, strict=True))


def check_memory(run: RunConfig, ranks_on_host: int) -> None:
    """Raise ResourceError if the snapshots of ``ranks_on_host`` ranks do not fit into the memory of this host."""
    folder, needed = snapshot_folder(run.checkpoint), planned_host_bytes(run, ranks_on_host)
    free = _free_memory(folder)
    if needed > free:
        raise ResourceError(
            f"--snapshot-interval: {describe_snapshots(run, ranks_on_host)}, and {with_prefix(free, 'B')} are free in "
            f"{folder.parent} and in the memory of this host: enlarge it, use more hosts, or remove the flag"
        )


def _free_memory(folder: Path) -> int:
    """Bytes available for snapshots in ``folder``: free in its tmpfs and in memory, plus existing snapshots."""
    free = shutil.disk_usage(folder.parent).free
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = min(free, 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    return free + sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def describe_snapshots(run: RunConfig, ranks_on_host: int) -> str:
    """Text about the memory that snapshots need on a host."""
    needed = with_prefix(planned_host_bytes(run, ranks_on_host), "B")
    return f"the two snapshots of {counted(ranks_on_host, 'rank')} and the copies of others take up to {needed}"
