"""Take snapshots of a run in the memory of its hosts: see ``snapshot_files``."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron.checkpoint.collective_errors import on_all_ranks, on_rank_0
from megatron.checkpoint.engine_files import EngineFiles, StateFile
from megatron.checkpoint.files import Content, disk_errors, replace_text, xxh128_of
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.snapshot_files import (
    SLOTS,
    START_FILE,
    Shard,
    brought_folders,
    copy_holders,
    make_slots,
    marker,
    marker_text,
    read_start,
    snapshot_folder,
    this_host,
)
from megatron.checkpoint.tensor_files import write_archive
from megatron.common.errors import ResourceError, UserError
from megatron.config import RunConfig

_PART = 1 << 23
"""Bytes that a thread copies at a time."""
_COPYING = 4
"""Threads that copy into memory."""
_SENT = 1 << 26
"""Bytes of a message to another host."""


def requested_snapshots(checkpointer: Checkpointer, run: RunConfig, log: Callable[[str], None]) -> "Snapshots | None":
    """The snapshots of ``--snapshot-interval``; None without it, or if nothing is trained."""
    if run.checkpoint.snapshot_interval is None or run.train.skip_train:
        return None
    return Snapshots(checkpointer, run, log)


class Snapshots:
    """The snapshots that a run takes. Every rank must call every method; ``log`` is called with lines for the user."""

    def __init__(self, checkpointer: Checkpointer, run: RunConfig, log: Callable[[str], None]) -> None:
        """Begin anew: what earlier starts left in memory is removed. Raises CheckpointError if there is no place."""
        self._checkpointer, self._run, self._log = checkpointer, run, log
        self._save = Path(run.checkpoint.save or "")
        self._rank, self._hosts = dist.get_rank(), on_all_ranks(this_host)
        self._root = snapshot_folder(run.checkpoint)
        start = on_rank_0(self._begin)
        self._folder = self._root / start
        self._on_each_host(lambda: make_slots(self._root, start))
        copies = copy_holders(self._hosts)
        self._receiver = copies.get(self._rank)
        self._senders = [rank for rank, holder in copies.items() if holder == self._rank]
        timeout = timedelta(minutes=run.parallel.distributed_timeout_minutes)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if copies else None
        self._unused = torch.empty(_SENT if copies else 0, dtype=torch.uint8)  # takes no memory until it is written
        self._background = ThreadPoolExecutor(1, "snapshot")
        self._copying = ThreadPoolExecutor(_COPYING, "copy")
        self._in_flight: Future[None] | None = None
        self._slot = 0
        """Where the next one is written; the other slot has the newest complete one."""
        log(f"> snapshots in {self._root}{_where(copies)}")

    def take(self, iteration: int, skipped_samples: Sequence[range] = ()) -> None:
        """Copy the state after ``iteration`` into memory; hash it, and send it to another host, in the background.

        Waits for the snapshot before. If there is no memory for it, training continues with a warning.
        """
        self.finish()
        folder = self._folder / SLOTS[self._slot]
        description, files = self._checkpointer.collect(iteration, skipped_samples, folder, LiveState())
        try:
            sizes = on_all_ranks(lambda: self._write(files, folder, iteration))
            on_all_ranks(lambda: self._reserve(sizes, folder, iteration))
        except UserError as error:
            self._warn(error)
            return
        files.clear()
        self._in_flight = self._background.submit(self._complete, folder, sizes, description)

    def finish(self) -> None:
        """Wait until the last snapshot is complete on all ranks. If it is not, training continues with a warning."""
        pending, self._in_flight = self._in_flight, None
        if pending is None:
            return
        try:
            on_all_ranks(pending.result)
        except UserError as error:
            self._warn(error)
        else:
            self._slot = 1 - self._slot

    def discard(self) -> None:
        """Remove all snapshots: training has gone back to an older state."""
        self.finish()
        self._on_each_host(lambda: make_slots(self._root, self._folder.name))

    def remove(self) -> None:
        """The same at the end of the run, which leaves nothing in memory."""
        self.finish()
        self._on_each_host(self._remove_own)
        on_rank_0(self._end)

    def _begin(self) -> str:
        """A name for this start, which makes all snapshots of other starts invalid."""
        start = token_hex(8)
        for folder in brought_folders(self._save):
            rmtree(folder, ignore_errors=True)
        with disk_errors(self._save, START_FILE, 0):
            replace_text(self._save / START_FILE, start)
        return start

    def _warn(self, error: UserError) -> None:
        self._log(f"  warning: {error}; training continues without it")

    def _remove_own(self) -> None:
        rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # a run that has taken the folder over has snapshots there
            self._root.rmdir()

    def _end(self) -> None:
        if read_start(self._save) == self._folder.name:  # and not of a run that has taken the folder over
            (self._save / START_FILE).unlink(missing_ok=True)

    def _on_each_host(self, step: Callable[[], object]) -> None:
        """Call ``step()`` on the first rank of each host; all ranks wait for it."""
        is_first = self._hosts.index(self._hosts[self._rank]) == self._rank
        on_all_ranks(lambda: step() if is_first else None)

    def _write(self, files: Sequence[StateFile], folder: Path, iteration: int) -> dict[str, int]:
        """Write the files of this rank; their sizes by name."""
        for rank in (self._rank, *self._senders):
            marker(folder, rank).unlink(missing_ok=True)
        with _memory_errors(folder, iteration):
            sizes = {}
            for path, content in files:
                file = MemoryFile(path, self._copying)
                try:
                    write_archive(file, content)
                finally:
                    sizes[path.name] = file.close()
            return sizes

    def _reserve(self, sizes: Sequence[Mapping[str, int]], folder: Path, iteration: int) -> None:
        """Make the files for the copies that this rank will receive."""
        with _memory_errors(folder, iteration):
            for sender in self._senders:
                for name, size in sizes[sender].items():
                    file = _open(folder / name)
                    try:
                        os.ftruncate(file, size)
                        if size:
                            os.posix_fallocate(file, 0, size)
                    finally:
                        os.close(file)

    def _complete(self, folder: Path, sizes: Sequence[Mapping[str, int]], description: Mapping[str, Any]) -> None:
        """Hash the files, exchange copies with other hosts, and mark all as complete. Runs in the background.

        A rank that fails still exchanges with others, which wait for it; it marks nothing then.
        """
        text, sent, errors = b"", list[Tensor](), list[OSError]()
        try:
            files = {name: (size, xxh128_of(folder / name)) for name, size in sizes[self._rank].items()}
            shard = Shard(description["iteration"], self._rank, len(self._hosts), files, str(folder))
            told = description if self._rank == 0 else None
            text, sent = marker_text(shard, told).encode(), _chunks(folder, sizes[self._rank])
        except OSError as error:
            errors.append(error)
        texts = {self._rank: text.decode()} | self._exchange_copies(text, sent, folder, sizes, errors)
        with _memory_errors(folder, description["iteration"]):
            if errors:
                raise errors[0]
            for rank, content in texts.items():
                replace_text(marker(folder, rank), content)

    def _exchange_copies(
        self,
        text: bytes,
        sent: Sequence[Tensor],
        folder: Path,
        sizes: Sequence[Mapping[str, int]],
        errors: list[OSError],
    ) -> dict[int, str]:
        """Send the ``text`` of a marker and the files of this rank, or no text, and no files, if they cannot be read.

        Receive those of others. Returns their texts; what keeps this rank from their files joins ``errors``.
        """
        if self._group is None:
            return {}
        lengths = {sender: torch.zeros(1, dtype=torch.int64) for sender in self._senders}
        self._exchange([torch.tensor([len(text)])], {sender: [length] for sender, length in lengths.items()})
        texts = {sender: torch.empty(int(n), dtype=torch.uint8) for sender, n in lengths.items() if n}
        received = {sender: [content] for sender, content in texts.items()}
        for sender, chunks in received.items():
            try:
                chunks += _chunks(folder, sizes[sender])
            except OSError as error:
                errors.append(error)
                chunks += self._unused_chunks(sizes[sender])
        self._exchange([torch.frombuffer(bytearray(text), dtype=torch.uint8), *sent] if text else [], received)
        return {sender: content.numpy().tobytes().decode() for sender, content in texts.items()}

    def _unused_chunks(self, sizes: Mapping[str, int]) -> list[Tensor]:
        """As ``_chunks()``, for what is received, and not kept: all in the same memory, one after the other."""
        return [self._unused[: min(_SENT, size - begin)] for size in sizes.values() for begin in range(0, size, _SENT)]

    def _exchange(self, sent: Sequence[Tensor], received: Mapping[int, Sequence[Tensor]]) -> None:
        """Send tensors to the rank that keeps copies, and receive those of others, one of each at a time."""
        for out, *into in zip_longest(sent, *received.values()):
            works: list[Any] = [] if out is None else [dist.isend(out, self._receiver, group=self._group)]
            works += [
                dist.irecv(tensor, sender, group=self._group)
                for sender, tensor in zip(received, into, strict=True)
                if tensor is not None
            ]
            for work in works:
                work.wait()


def _where(copies: Mapping[int, int]) -> str:
    if copies:
        return ", each with a copy on the next host"
    return ", which outlive killed ranks, not the host: there is no other one for a copy"


class LiveState(EngineFiles):
    """Keeps the tensors of the engine themselves, for a writer that is done before training continues."""

    def __init__(self) -> None:
        super().__init__(copies=False)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict``. Of a tensor that is part of a larger storage a copy is kept: a file has storages."""
        kept = tree_map(_whole_storage, state_dict, is_leaf=lambda part: isinstance(part, torch.Size))
        self._kept.append((Path(path), kept))

    def preserves_storage_sharing(self) -> bool:
        """No: DeepSpeed need not copy anything."""
        return False


def _whole_storage(leaf: Any) -> Any:
    """``leaf``, or a copy of a tensor that is a small part of its storage; some of ZeRO's lack no more than padding."""
    if not isinstance(leaf, Tensor) or leaf.nbytes >= 0.9 * leaf.untyped_storage().nbytes():
        return leaf
    return leaf.detach().clone()


class MemoryFile:
    """A file in memory, written from beginning to end over the earlier one of that name, whose memory is used again.

    Several threads copy. No CRC-32 is computed: an archive in it has zeros instead, which torch does not compare.
    """

    def __init__(self, path: Path, threads: ThreadPoolExecutor) -> None:
        self._file, self._threads, self._size = _open(path), threads, 0

    def write(self, data: Content | Callable[[], bytes], check: Callable[[memoryview], None] | None = None) -> None:
        """Append ``data``, or what a function returns. Raises OSError if there is no memory."""
        whole = memoryview(data() if callable(data) else data).cast("B")
        parts = [(self._size + begin, whole[begin : begin + _PART]) for begin in range(0, len(whole), _PART)]
        if len(parts) == 1:
            self._copy(parts[0])
        else:
            copies = [self._threads.submit(self._copy, part) for part in parts]
            wait(copies)  # for all of them, also if one fails: the file is closed then
            for copy in copies:
                copy.result()
        self._size += len(whole)

    def _copy(self, part: tuple[int, memoryview]) -> None:
        place, data = part
        while data:
            count = os.pwrite(self._file, data, place)
            place, data = place + count, data[count:]

    def close(self) -> int:
        """End the file here. Returns its size."""
        os.ftruncate(self._file, self._size)
        os.close(self._file)
        return self._size


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _chunks(folder: Path, sizes: Mapping[str, int]) -> list[Tensor]:
    """The bytes of files, mapped into memory, in messages: tensors [at most _SENT]. Raises OSError."""
    files = [torch.from_numpy(np.memmap(folder / name, mode="r+", shape=size)) for name, size in sizes.items() if size]
    return [chunk for file in files for chunk in file.split(_SENT)]


@contextmanager
def _memory_errors(folder: Path, iteration: int) -> Iterator[None]:
    """Convert an OSError of the block to a ResourceError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        what = f"the snapshot of iteration {iteration}"
        raise ResourceError(f"{what} cannot be written to {folder} ({reason})") from error
