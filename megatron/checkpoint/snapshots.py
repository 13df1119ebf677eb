"""Takes snapshots of a run in the memory of its hosts: see ``snapshot_files``."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.collective_errors import gathered_on_rank_0, on_all_ranks, on_rank_0
from megatron.checkpoint.engine_files import EngineFiles, StateFile, pinned_copies
from megatron.checkpoint.files import disk_errors, replace_text
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.snapshot_files import (
    START_FILE,
    Shard,
    brought_folders,
    copy_holders,
    make_start_folder,
    read_start,
    snapshot_folder,
    this_host,
    write_marker,
)
from megatron.checkpoint.tensor_files import write_files
from megatron.checkpoint.tracker import latest_iteration
from megatron.common.errors import ResourceError, UserError
from megatron.config import RunConfig
from megatron.launch.progress import SNAPSHOT_THREAD

_MESSAGE = 1 << 26
"""Maximum bytes of a message to another host."""


def requested_snapshots(checkpointer: Checkpointer, run: RunConfig, log: Callable[[str], None]) -> "Snapshots | None":
    """The snapshots of ``--snapshot-interval``; None without it, or if nothing is trained."""
    if run.checkpoint.snapshot_interval is None or run.train.skip_train:
        return None
    return Snapshots(checkpointer, run, log)


class Snapshots:
    """Takes the snapshots of a run. Every rank must call every method; ``log`` is called with lines for the user."""

    def __init__(self, checkpointer: Checkpointer, run: RunConfig, log: Callable[[str], None]) -> None:
        """Remove snapshots of earlier starts from memory. Raises CheckpointError if the folder cannot be used."""
        self._checkpointer, self._log = checkpointer, log
        self._save = Path(run.checkpoint.save or "")
        self._rank, self._hosts = dist.get_rank(), gathered_on_rank_0(this_host, list)
        self._root = snapshot_folder(run.checkpoint)
        start = on_rank_0(self._begin)
        self._folder = self._root / start
        self._on_each_host(lambda: make_start_folder(self._root, start))
        copies = copy_holders(self._hosts)
        self._receiver = copies.get(self._rank)
        self._senders = [rank for rank, holder in copies.items() if holder == self._rank]
        timeout = timedelta(minutes=run.parallel.distributed_timeout_minutes)
        with patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):  # a rank only connects to its two neighbors
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._background = ThreadPoolExecutor(1, SNAPSHOT_THREAD)
        self._files = EngineFiles(pinned_copies(checkpointer.engine))
        self._in_flight: tuple[Path, Future[None]] | None = None
        alone = "which survive process failures only, not the loss of the host: there is no other one for a copy"
        log(f"> snapshots in {self._root}, {'each with a copy on the next host' if copies else alone}")

    def reserve(self, iteration: int) -> None:
        """Allocate the memory for copies of the state, so that the first snapshot need not wait for it."""
        self._checkpointer.reserve(iteration, self._files)

    def take(self, iteration: int, skipped_samples: Sequence[range] = ()) -> None:
        """Write the state after ``iteration`` into memory, and send it to another host, in the background.

        Waits for the previous snapshot. On the CPU also waits until the state is written, since it is not copied. If
        there is not enough memory, training continues with a warning.
        """
        self.finish()
        folder = self._folder / str(iteration)
        files = self._checkpointer.collect(iteration, skipped_samples, folder, self._files)
        try:
            self._on_each_host(_memory_errors(folder)(lambda: folder.mkdir(0o700, exist_ok=True)))
        except UserError as error:
            self._give_up(folder, error)
            return
        written = self._background.submit(self._write, files, folder)
        self._in_flight = folder, self._background.submit(self._complete, folder, written)
        if self._files.copies is None:
            wait([written])

    def finish(self) -> None:
        """Wait until the last snapshot is complete on all ranks, and remove the previous one.

        If it cannot be completed, training continues with a warning.
        """
        if self._in_flight is None:
            return
        (folder, pending), self._in_flight = self._in_flight, None
        try:
            on_all_ranks(pending.result)
        except UserError as error:
            self._give_up(folder, error)
        else:
            self._on_each_host(lambda: self._remove_all_but(folder))

    def discard(self) -> None:
        """Remove all snapshots: training has gone back to an older state."""
        self.finish()
        self._on_each_host(lambda: self._remove_all_but(None))

    def remove(self) -> None:
        """Remove all snapshots and their folders, at the end of the run."""
        self.finish()
        self._on_each_host(self._remove_root)
        on_rank_0(self._end)

    def _begin(self) -> str:
        """Make a new identifier for this start, which invalidates the snapshots of other starts."""
        start = token_hex(8)
        for folder in brought_folders(self._save):
            rmtree(folder, ignore_errors=True)
        with disk_errors(self._save, START_FILE, 0):
            replace_text(self._save / START_FILE, start)
        return start

    def _end(self) -> None:
        if read_start(self._save) == self._folder.name:  # and not of a run that has taken the folder over
            (self._save / START_FILE).unlink(missing_ok=True)

    def _remove_root(self) -> None:
        rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # a run that has taken the folder over has snapshots there
            self._root.rmdir()

    def _remove_all_but(self, kept: Path | None) -> None:
        for folder in self._folder.glob("*"):  # none if a run that has taken the folder over has removed it
            if folder != kept:
                rmtree(folder, ignore_errors=True)

    def _give_up(self, folder: Path, error: UserError) -> None:
        self._on_each_host(lambda: rmtree(folder, ignore_errors=True))
        self._log(f"  warning: {error}; training continues without it")

    def _on_each_host(self, step: Callable[[], object]) -> None:
        """Call ``step()`` on the first rank of each host; all ranks wait."""
        is_first = self._hosts.index(self._hosts[self._rank]) == self._rank

        def call() -> None:
            if is_first:
                step()

        on_all_ranks(call)

    def _write(self, files: list[StateFile], folder: Path) -> Shard:
        """Write the files of this rank. Runs in the background."""
        self._files.wait()
        with _memory_errors(folder):
            records = write_files(files, folder, crc32=False)
        hashes = {name: (record.size, str(record.xxh128)) for name, record in records.items()}
        latest = latest_iteration(self._save) if self._rank == 0 else None
        return Shard(int(folder.name), self._rank, len(self._hosts), hashes, str(folder), latest=latest or 0)

    def _complete(self, folder: Path, written: Future[Shard]) -> None:
        """Send this rank's shard, receive shards of other ranks, and mark all as complete. Runs in the background.

        A rank that fails informs its neighbors, and raises its error here; on other ranks only ``finish`` raises it.
        """
        receivers = [] if self._receiver is None else [self._receiver]
        errors: list[Exception] = []
        sent, received = dict[int, list[Tensor]](), dict[int, list[Tensor]]()

        def own() -> Shard:
            sent.update({rank: _messages(folder, written.result()) for rank in receivers})
            return written.result()

        def made() -> bool:
            received.update({rank: _make_files(folder, shard) for rank, shard in shards.items() if shard is not None})
            return True

        with _memory_errors(folder):
            shards = self._exchange_results(own, receivers, self._senders, errors)
            accepted = self._exchange_results(made, self._senders, receivers, errors)
            self._exchange({rank: sent[rank] for rank in sent if accepted[rank]}, {} if errors else received)
            if errors:
                raise errors[0]
            for shard in (written.result(), *filter(None, shards.values())):
                write_marker(shard, folder)

    def _exchange_results(
        self, step: Callable[[], object], to: Sequence[int], of: Sequence[int], errors: list[Exception]
    ) -> dict[int, Any]:
        """Send the result of ``step()``, None if it fails, to the ranks ``to``. Returns results of the ranks ``of``."""
        result = None
        try:
            result = step() if not errors else None
        except Exception as error:
            errors.append(error)
        data = torch.frombuffer(bytearray(pickle.dumps(result)), dtype=torch.uint8)
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in of}
        self._exchange(dict.fromkeys(to, [torch.tensor([len(data)])]), {rank: [size] for rank, size in sizes.items()})
        buffers = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        self._exchange(dict.fromkeys(to, [data]), {rank: [buffer] for rank, buffer in buffers.items()})
        return {rank: pickle.loads(buffer.numpy().tobytes()) for rank, buffer in buffers.items()}

    def _exchange(self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]]) -> None:
        """Send and receive lists of tensors, given by rank."""
        calls = [(dist.isend, rank) for rank in sent] + [(dist.irecv, rank) for rank in received]
        for tensors in zip_longest(*sent.values(), *received.values()):
            ready = [(*call, tensor) for call, tensor in zip(calls, tensors, strict=True) if tensor is not None]
            works: list[Any] = [call(tensor, rank, group=self._group) for call, rank, tensor in ready]
            for work in works:
                work.wait()


def _messages(folder: Path, shard: Shard) -> list[Tensor]:
    """The memory-mapped bytes of a shard's files, as tensors of at most ``_MESSAGE`` bytes. Raises OSError."""
    sizes = {name: size for name, (size, _) in shard.files.items() if size}
    files = [torch.from_numpy(np.memmap(folder / name, mode="r+", shape=size)) for name, size in sizes.items()]
    return [message for file in files for message in file.split(_MESSAGE)]


def _make_files(folder: Path, shard: Shard) -> list[Tensor]:
    """Create the files of another rank's shard, with memory allocated. Returns their bytes like ``_messages``."""
    for name, (size, _) in shard.files.items():
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            if size:
                os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)
    return _messages(folder, shard)


@contextmanager
def _memory_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in the block, which writes a snapshot into ``folder``, into a ResourceError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        what = f"the snapshot of iteration {folder.name}"
        raise ResourceError(f"{what} cannot be written to {folder} ({reason})") from error
