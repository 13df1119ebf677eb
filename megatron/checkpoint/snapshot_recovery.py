"""Resume from the newest snapshot in the memory of the hosts, if it is newer than the checkpoints on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.checkpoint import tracker
from megatron.checkpoint.collective_errors import on_all_ranks, on_rank_0
from megatron.checkpoint.files import Record, check_disk_space, disk_errors, xxh128_of
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.load import select_checkpoint
from megatron.checkpoint.saved_run import SavedRun
from megatron.checkpoint.snapshot_files import (
    Place,
    Shard,
    brought_folders,
    divide,
    newest_whole,
    read_description,
    read_shards,
    read_start,
    snapshot_folder,
    this_host,
)
from megatron.checkpoint.tensor_files import read_checked_file, write_file
from megatron.common.errors import CheckpointError
from megatron.config import RunConfig


def select_newest(run: RunConfig, lock: FolderLock | None) -> SavedRun | None:
    """As ``select_checkpoint``; with ``--snapshot-interval``, a newer snapshot in memory is saved to disk before.

    Every rank must call it; ``lock`` is that of the folder, on the rank that holds it. Raises ResourceError if the disk
    is full, CheckpointError if the folder cannot be written.
    """
    if run.checkpoint.snapshot_interval is None:
        return select_checkpoint(run)
    memory = _Memory(run, lock)
    on_disk = on_rank_0(memory.newest_on_disk)
    recovered = memory.recover(on_disk)
    saved = select_checkpoint(run)
    # Verification has found that the newest checkpoint is damaged: the snapshot may be the newest one now.
    if not recovered and on_disk and (saved is None or saved.iteration < on_disk):
        if memory.recover(saved.iteration if saved else 0):
            saved = select_checkpoint(run)
    return saved


class _Written(NamedTuple):
    """What a rank has written of a snapshot."""

    records: Mapping[str, Record]
    description: Mapping[str, Any] | None
    broken: Sequence[tuple[Place, str]]
    """Shards that are damaged, and how."""


class _Memory:
    """The snapshots of a run in the memory of all hosts. Every rank must call every method but the first."""

    def __init__(self, run: RunConfig, lock: FolderLock | None) -> None:
        self._config, self._save, self._lock = run.checkpoint, Path(run.checkpoint.save or ""), lock
        self._hosts = on_all_ranks(this_host)
        start = on_rank_0(lambda: read_start(self._save))
        rank = dist.get_rank()
        # Of each host the first rank looks; what other hosts have brought to the disk counts as rank 0's.
        folders = [snapshot_folder(run.checkpoint)] if self._hosts.index(self._hosts[rank]) == rank else []
        folders += brought_folders(self._save) if rank == 0 else []
        shards = on_all_ranks(lambda: [shard for folder in folders for shard in read_shards(folder, start)])
        self._found = dict(enumerate(shards))

    def newest_on_disk(self) -> int:
        """The iteration of the newest checkpoint that has all its files; 0 if there is none."""
        try:
            return tracker.newest(self._save).iteration
        except CheckpointError:
            return 0

    def recover(self, after: int) -> bool:
        """Save the newest whole snapshot, if it is of an iteration after ``after``. Returns whether there was one."""
        broken: dict[Place, str] = {}
        while (snapshot := newest_whole(self._found, after, broken)) is not None:
            iteration = next(iter(snapshot.values()))[0][1].iteration
            work = divide(snapshot, self._hosts)
            size = sum(shard.size for shards in work.values() for _, shard in shards)
            what, path = f"the snapshot of iteration {iteration}", self._begin(iteration, size)

            @disk_errors(self._save, what, size)
            def write() -> _Written:
                return _write(work.get(dist.get_rank(), []), path)  # noqa: B023

            written = on_all_ranks(write)
            damaged = {place: text for one in written for place, text in one.broken}
            if not damaged:
                on_rank_0(lambda: self._commit(written, path))  # noqa: B023
                names = sorted({self._hosts[first].split()[0] for shards in work.values() for first, _ in shards})
                _print(f"> {what}: saved as {tracker.tag_name(iteration)}, from the memory of {' '.join(names)}")
                return True
            broken |= damaged
            for text in damaged.values():
                _print(f"> warning: {what}: {text}")
        newest = max((shard.iteration for shards in self._found.values() for shard in shards), default=0)
        if newest > after:
            _print(f"> the snapshot of iteration {newest} is not complete on the hosts that are left")
        return False

    def _begin(self, iteration: int, size: int) -> Path:
        """The empty folder to write a checkpoint into."""
        tag, what = tracker.tag_name(iteration), f"the snapshot of iteration {iteration}"

        @disk_errors(self._save, what, size)
        def begin() -> Path:
            path = tracker.begin_tag(self._save, tag)
            check_disk_space(self._save, f"--save {self._save}: {what}", size)
            return path

        return on_rank_0(begin)

    def _commit(self, written: Sequence[_Written], path: Path) -> None:
        records = {name: record for one in written for name, record in one.records.items()}
        description = next(dict(one.description) for one in written if one.description is not None)
        with disk_errors(self._save, path.stem, 0):
            if self._lock is not None:
                self._lock.check()
            iteration = description["iteration"]
            tracker.commit_tag(self._save, tracker.tag_name(iteration), description, records)
            tracker.remove_old_tags(self._save, iteration, self._config)


def _write(shards: Sequence[tuple[int, Shard]], path: Path) -> _Written:
    """Write shards of this host's memory to disk, in the form of a checkpoint, with all its hashes."""
    records: dict[str, Record] = {}
    description, broken = None, []
    for first, shard in shards:
        try:
            contents = _read(shard)
        except CheckpointError as error:
            broken.append(((first, shard.folder, shard.rank), str(error)))
            continue
        if shard.rank == 0:
            description = read_description(shard)
        records |= {name: write_file(path / name, content) for name, content in contents.items()}
    return _Written(records, description, broken)


def _read(shard: Shard) -> dict[str, Any]:
    """The contents of the files of ``shard``, mapped into memory. Raises CheckpointError if one is damaged."""
    folder = Path(shard.folder)
    for name, (_, digest) in shard.files.items():
        try:
            found = xxh128_of(folder / name)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error.strerror})") from None
        if found != digest:
            raise CheckpointError(f"{folder / name} is damaged: its hash differs from that of the snapshot")
    return {name: read_checked_file(folder / name, mapped=True) for name in shard.files}


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
