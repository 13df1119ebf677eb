"""The lock of ``--save`` for all ranks of a run, on hosts that must share the folder."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.collective_errors import on_all_ranks, on_rank_0
from megatron.checkpoint.files import disk_errors
from megatron.checkpoint.folder_lock import LOCK, FolderLock, Owner, owner_of
from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import RunConfig
from megatron.launch.rank import exit_now

_LOOKS = 10
"""Maximum number of looks for the lock, one second apart."""


@contextmanager
def lock_folder(run: RunConfig) -> Iterator[FolderLock | None]:
    """Hold the lock of ``--save`` on rank 0 inside the block; None on other ranks, or without a folder.

    Every rank must enter it. Once another run has taken the lock, the process ends with exit code 4.
    Raises CheckpointError on all ranks if another run holds the lock, or the folder cannot be written; ConfigError if
    not all hosts share the folder.
    """
    lock = None
    if run.checkpoint.save and dist.get_rank() == 0:
        lock = FolderLock(Path(run.checkpoint.save), when_lost=partial(exit_now, exit_code=CheckpointError.exit_code))
    on_rank_0(lambda: disk_errors(lock.folder, LOCK, 0)(lock.take)() if lock else None)
    try:
        if run.checkpoint.save:
            owner = on_rank_0(lambda: owner_of(lock.folder) if lock else None)
            is_first = not run.parallel.local_rank  # one rank of each host asks, not each of thousands
            on_all_ranks(lambda: _check_shared(Path(str(run.checkpoint.save)), owner) if is_first else None)
        yield lock
    finally:
        if lock:
            lock.release()


def _check_shared(folder: Path, owner: Owner | None) -> None:
    """Raise ConfigError unless this rank sees the lock of the folder that ``owner``, rank 0, has taken."""
    for _ in range(_LOOKS):
        for place in (folder.parent, folder):
            with suppress(OSError):
                os.listdir(place)  # so that a network file system asks its server
        if owner_of(folder) == owner:
            return
        time.sleep(1)
    raise ConfigError(
        f"--save {folder}: not the folder of rank 0, but another one on {socket.gethostname()}: name one that all "
        "hosts share"
    )
