"""Recovers the newest snapshot in the memory of the hosts, if it is newer than the checkpoints on disk."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint import tracker
from megatron.checkpoint.collective_errors import gathered_on_rank_0, on_rank_0
from megatron.checkpoint.commit import begin_tag, commit_tag
from megatron.checkpoint.files import Record, check_disk_space, copy_file, disk_errors
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.load import select_checkpoint
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.snapshot_files import (
    Place,
    Shard,
    brought_folders,
    divide,
    newest_complete,
    read_shards,
    read_start,
    snapshot_folder,
    this_host,
)
from megatron.common.checkpoint_folders import make_subfolder, rank_file_path
from megatron.common.errors import CheckpointError
from megatron.config import RunConfig

Work = Mapping[int, Sequence[Shard]]
"""The shards that each rank writes; they are in its host's memory."""


def select_newest(run: RunConfig, lock: FolderLock | None) -> SavedRun | None:
    """``select_checkpoint``, but with ``--snapshot-interval`` a newer snapshot in memory is first saved to disk.

    Every rank must call it; ``lock`` is the lock of the folder, on the rank that holds it. Raises ResourceError if the
    disk is full, CheckpointError if the folder cannot be written.
    """
    if run.checkpoint.snapshot_interval is None:
        return select_checkpoint(run)
    hosts = gathered_on_rank_0(this_host, list)
    shards = _find_shards(run, hosts)
    on_disk = on_rank_0(lambda: _newest_on_disk(run))
    recover = partial(_recover, run, lock, hosts, shards)
    recovered = recover(on_disk)
    saved = select_checkpoint(run)
    # If verification finds that the newest checkpoint is damaged, the snapshot may be newer.
    if not recovered and on_disk and (saved is None or saved.iteration < on_disk):
        if recover(saved.iteration if saved else 0):
            saved = select_checkpoint(run)
    return saved


def _find_shards(run: RunConfig, hosts: Sequence[str]) -> list[Shard]:
    """The shards in the memory of all hosts; shards of idle hosts, which are on disk, count as rank 0's.

    None of them count if the user has gone back to an older checkpoint, or removed all.
    """
    save, rank = Path(run.checkpoint.save or ""), dist.get_rank()
    start, latest = on_rank_0(lambda: (read_start(save), tracker.latest_iteration(save)))
    folders = [snapshot_folder(run.checkpoint)] if hosts.index(hosts[rank]) == rank else []
    folders += brought_folders(save) if rank == 0 else []
    per_rank = gathered_on_rank_0(lambda: [shard for folder in folders for shard in read_shards(folder, start)], list)
    found = [shard._replace(host=rank) for rank, shards in enumerate(per_rank) for shard in shards]
    if latest is not None and any(shard.latest > latest for shard in found):
        _print(f"> the snapshots in memory are not used: the newest checkpoint of {save} is an older one than then")
        return []
    return found


def _newest_on_disk(run: RunConfig) -> int:
    """The iteration of the newest complete checkpoint; 0 if there is none."""
    try:
        return tracker.newest(run.checkpoint.save or "").iteration
    except CheckpointError:
        return 0


def _recover(run: RunConfig, lock: FolderLock | None, hosts: Sequence[str], found: Sequence[Shard], after: int) -> bool:
    """Save the newest complete snapshot after iteration ``after``. Returns whether there was one."""
    broken: dict[Place, str] = {}
    while (snapshot := newest_complete(found, after, broken)) is not None:
        work = divide(snapshot, hosts)
        iteration = next(iter(snapshot.values()))[0].iteration
        what = f"the snapshot of iteration {iteration}"
        damaged = _save(run, lock, work, iteration)
        if not damaged:
            names = sorted({hosts[shard.host].split()[0] for shards in work.values() for shard in shards})
            _print(f"> {what}: saved as {tracker.tag_name(iteration)}, from the memory of {' '.join(names)}")
            return True
        broken |= damaged
        for text in damaged.values():
            _print(f"> warning: {what}: {text}")
    newest = max((shard.iteration for shard in found), default=0)
    if newest > after:
        _print(f"> the snapshot of iteration {newest} is not complete on the hosts that are left")
    return False


def _save(run: RunConfig, lock: FolderLock | None, work: Work, iteration: int) -> dict[Place, str]:
    """Save the snapshot of ``iteration`` as a checkpoint, unless shards are damaged. Returns the damaged shards."""
    save, what = Path(run.checkpoint.save or ""), f"the snapshot of iteration {iteration}"
    size = sum(shard.size for shards in work.values() for shard in shards)

    @disk_errors(save, what, size)
    def begin() -> Path:
        path = begin_tag(save, tracker.tag_name(iteration))
        check_disk_space(save, f"--save {save}: {what}", size)
        return path

    path = on_rank_0(begin)
    own = work.get(dist.get_rank(), ())

    @disk_errors(save, what, size)
    def commit(written: list[tuple[dict[str, Record], dict[Place, str]]]) -> dict[Place, str]:
        damaged = {place: text for _, broken in written for place, text in broken.items()}
        if not damaged:
            if lock is not None:
                lock.check()
            records = {name: record for copied, _ in written for name, record in copied.items()}
            commit_tag(save, iteration, records, run.checkpoint)
        return damaged

    return gathered_on_rank_0(disk_errors(save, what, size)(lambda: _write(own, path)), commit)


def _write(shards: Sequence[Shard], path: Path) -> tuple[dict[str, Record], dict[Place, str]]:
    """Copy shards from this host's memory to disk. Returns records of the files, and messages about damaged shards."""
    records: dict[str, Record] = {}
    broken: dict[Place, str] = {}
    for shard in shards:
        for name, (_, digest) in shard.files.items():
            file = rank_file_path(path / name, shard.ranks)
            make_subfolder(file, path)
            record = records[file.relative_to(path).as_posix()] = copy_file(Path(shard.folder) / name, file)
            if record.xxh128 != digest:
                problem = "is damaged: its hash differs from that of the snapshot"
                broken[shard.place] = f"{Path(shard.folder) / name} {problem}"
    return records, broken


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
