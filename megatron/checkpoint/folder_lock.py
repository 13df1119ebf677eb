"""Lock of a checkpoint folder, ``SAVE/.writer.lock``: only one run at a time saves into a folder. No torch here.

It is a lease, not a lock of ``filelock``: on many network file systems flock() does not exclude other hosts, or never
releases the lock of a lost host. The file is created exclusively, which also works on NFS, and its owner renews it
every few seconds. It is stale

- if its owner ran on this host and has ended, or does not have the file open, which is then a copy of another folder's;
- if its owner ran elsewhere (another host, another container) and has not renewed it for ``LEASE_SECONDS``, which is
  measured by watching the file, since the clocks of two hosts may differ;
- if it names no owner, and none writes its own content over it, as each renewal does.

A stale file is replaced, so that a run resumes after any crash without cleanup. The elastic agent does not wait for a
lease: it may displace an owner that it has started itself, which then ends within ``RENEWAL_SECONDS``.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.checkpoint.files import make_folder
from megatron.common.errors import CheckpointError
from megatron.common.files import UNFINISHED, file_mode
from megatron.common.processes import machine_id
from megatron.common.reading import parse_json
from megatron.launch.rank import print_warning

LOCK = ".writer.lock"
SAVES = "saves into this folder"
RUN_VARIABLE = "MEGATRON_ELASTIC_RUN"
"""Environment variable of all processes of an elastic run, with which the agent finds them to end them."""
RENEWAL_SECONDS = 5.0
LEASE_SECONDS = 30.0
_UNREADABLE = "unreadable"
"""Content of a file that cannot be read: its owner may be alive."""
_SIZE = 1024
"""Bytes of the file, including padding, so that a renewal never changes its size."""


@dataclass(frozen=True)
class Owner:
    """The process that saves into a folder."""

    host: str
    pid: int
    started: str
    """Start time of the process in clock ticks since the host was started; empty if the system does not report it."""
    machine: str
    """Boot id and process namespace of the host: equal for processes that see the same process ids."""
    token: str
    """Random identifier of the run."""
    run: str = ""
    """Identifier of the elastic run, the same for all of its starts; empty without one."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else f"its elastic agent on {self.host}"

    @property
    def is_displaced(self) -> bool:
        """Whether an elastic agent has taken the lock from its owner, so that no process holds it."""
        return self.pid == 0


class FolderLock:
    """The lock of ``folder``, held by this process from ``take()`` to ``release()``.

    Files of different ``name`` are different locks. ``use`` is what the owner does, for messages. ``when_lost`` is
    called, from another thread, with a message for the user when another process has taken the lock.
    """

    def __init__(
        self, folder: Path, name: str = LOCK, use: str = SAVES, when_lost: Callable[[str], object] | None = None
    ) -> None:
        self.folder, self._path, self._use, self._when_lost = folder, folder / name, use, when_lost
        process = (socket.gethostname(), os.getpid(), start_time(os.getpid()), machine_id())
        self._owner = Owner(*process, secrets.token_hex(8), os.environ.get(RUN_VARIABLE, ""))
        self._file, self._renewals = -1, 0
        self._over = threading.Event()

    def take(self) -> None:
        """Take the lock; wait for up to ``LEASE_SECONDS`` if its owner may have ended.

        Raises CheckpointError if another run holds it; OSError if the folder cannot be written.
        """
        make_folder(self.folder)
        while not self._create():
            text, owner = _read(self._path)
            if text is not None:
                if self._is_held(text, owner, announced=True):
                    raise CheckpointError(_in_use(self.folder, owner, self._use))
                self._remove(text)
        threading.Thread(target=self._renew, name="folder lock", daemon=True).start()

    def take_over(self) -> bool:
        """Wait until the owner has ended, and take the lock if it has not released it; False if it has.

        Without an owner the lock is taken at once. Raises the same errors as ``take()``.
        """
        text, owner = _read(self._path)
        if text is not None:
            while text is not None and self._is_held(text, owner):
                time.sleep(_pause())
                text, owner = _read(self._path)
            if not os.path.lexists(self._path):
                return False
            if text is not None:
                self._remove(text)
        self.take()
        return True

    def check(self) -> None:
        """Raise CheckpointError if another run has taken over the folder, since this process was suspended for long.

        A file that cannot be read is ignored; a file that the user has deleted is created again.
        """
        text, owner = _read(self._path)
        with suppress(OSError):
            if text is None and self._create():
                return
        if owner is not None and owner.token != self._owner.token:
            raise CheckpointError(self._lost_to(owner))

    def _lost_to(self, owner: Owner) -> str:
        return (
            f"--save {self.folder}: another run ({owner}) has taken the folder over while this one did not "
            "respond; end one of them, or name another folder"
        )

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        self._over.set()
        _, owner = _read(self._path)
        with suppress(OSError):
            if owner is not None and owner.token == self._owner.token:
                self._path.unlink()

    def _create(self) -> bool:
        """Create the file; False if it exists."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, file_mode())
        except FileExistsError:
            return False
        self._file, earlier = file, self._file
        if earlier >= 0:
            os.close(earlier)
        self._write()
        return True

    def _write(self) -> None:
        text = json.dumps({**asdict(self._owner), "renewals": self._renewals})
        os.pwrite(self._file, text.ljust(_SIZE - 1).encode() + b"\n", 0)
        os.fsync(self._file)

    def _renew(self) -> None:
        while not self._over.wait(RENEWAL_SECONDS):
            self._renewals += 1
            with suppress(OSError):  # check() handles a file that no longer exists
                self._write()
            owner = _read(self._path)[1]
            if self._when_lost and owner and owner.token != self._owner.token and not self._over.is_set():
                self._when_lost(self._lost_to(owner))

    def _is_held(self, text: str, owner: Owner | None, *, announced: bool = False) -> bool:
        """Whether the owner of the file with content ``text`` is alive; on another host, whether it renews the file."""
        if owner is not None and _is_here(owner):
            return _holds(owner, self._path)
        if owner is not None and owner.is_displaced:
            return False
        lease = LEASE_SECONDS if owner or text == _UNREADABLE else 1.2 * RENEWAL_SECONDS
        if announced:
            whose = f"that of {owner}" if owner else "of another run"
            print_warning(f"--save {self.folder}: waiting up to {lease:.0f} s for a lock, {whose}, to expire")
        waited = 0.0
        while waited < lease:  # not counting the time of reads: the file system may hang, for its owner, too
            time.sleep(_pause())
            waited += _pause()
            if (now := _read(self._path)[0]) != text:
                return now is not None
        return False

    def _remove(self, stale: str) -> None:
        """Remove the file if it still contains ``stale``; if several processes do this, one of them takes the lock."""
        moved = self._path.with_name(f"{self._path.name}.{self._owner.token}{UNFINISHED}")
        with suppress(FileNotFoundError):
            os.rename(self._path, moved)
            if _read(moved)[0] != stale:  # another process was faster: the file is no longer stale
                with suppress(OSError):
                    os.link(moved, self._path)
            moved.unlink()


def check_unlocked(folder: Path) -> None:
    """Raise CheckpointError if a running process of this host holds the lock of ``folder``. Changes nothing."""
    _, owner = _read(folder / LOCK)
    if owner is not None and _is_here(owner) and _holds(owner, folder / LOCK):
        raise CheckpointError(_in_use(folder, owner))


def owner_of(folder: Path) -> Owner | None:
    """The owner of the lock of ``folder``, running or not; None if there is none."""
    return _read(folder / LOCK)[1]


def last_renewal(folder: Path, run: str) -> str | None:
    """Content of the lock, which changes with each renewal; None if no process of the elastic ``run`` holds it."""
    text, owner = _read(folder / LOCK)
    return text if owner is not None and owner.run == run and not owner.is_displaced else None


def displace(folder: Path, owner: Owner) -> None:
    """Take the lock from ``owner``, which has ended or cannot be reached, so that the next start gets it at once.

    Only for an owner that the caller has started and now replaces.
    """
    free = replace(owner, host=socket.gethostname(), pid=0, started="", machine="", token=secrets.token_hex(8))
    moved = folder / f"{LOCK}.{free.token}{UNFINISHED}"
    moved.write_text(json.dumps(asdict(free)))
    if _read(folder / LOCK)[1] == owner:
        os.replace(moved, folder / LOCK)
    moved.unlink(missing_ok=True)


def _pause() -> float:
    """Seconds between two reads of a lock."""
    return min(1.0, LEASE_SECONDS / 10)


def _in_use(folder: Path, owner: Owner | None, use: str = SAVES) -> str:
    by = f" ({owner})" if owner else ""
    return f"--save {folder}: another run{by} {use}; end it, or name another folder"


def _read(path: Path) -> tuple[str | None, Owner | None]:
    """(content, owner) of the file: (None, None) if it does not exist, owner None if it cannot be read or parsed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            text = os.read(file, _SIZE).decode(errors="replace")
        finally:
            os.close(file)
    except FileNotFoundError:
        return None, None
    except OSError:
        return _UNREADABLE, None
    try:
        content = parse_json(text)
        owner = Owner(**{name: content[name] for name in Owner.__dataclass_fields__ if name in content})
    except (ValueError, KeyError, TypeError):
        return text, None
    return text, owner if type(owner.pid) is int else None


def start_time(pid: int) -> str:
    """Start time of a process; empty if it does not exist, or is a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _is_here(owner: Owner) -> bool:
    return bool(owner.machine and owner.started) and owner.machine == machine_id()


def _holds(owner: Owner, path: Path) -> bool:
    """Whether the owner, a process of this host, runs and has the file open: not if the folder has been copied."""
    if start_time(owner.pid) != owner.started:
        return False
    try:
        files = list(Path(f"/proc/{owner.pid}/fd").iterdir())
    except OSError:
        return True  # of another user
    for file in files:
        with suppress(OSError):  # it has been closed
            if file.samefile(path):
                return True
    return False
