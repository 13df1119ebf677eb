"""One run at a time saves into a folder: ``SAVE/.writer.lock`` names the process that does. No torch here.

This is a lease, not a lock of ``filelock``: on many network file systems flock() does not exclude other hosts, or the
lock of a host that is lost is never released. The file is created exclusively, which also works on NFS, and its owner
renews it every few seconds. It is stale

- if its owner ran on this host and has ended: no process has its id and start time;
- if its owner ran elsewhere (another host, another container) and has not renewed it for ``LEASE_SECONDS``, which is
  measured by watching it, since the clocks of two hosts may differ.

A stale file is replaced, so that a run resumes after any crash without cleanup. The elastic agent does not
wait for a lease: it may displace the owner that it has started itself, which then ends within ``RENEWAL_SECONDS``.
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
"""Environment variable of all processes of an elastic run, by which they are found when they are to be ended."""
RENEWAL_SECONDS = 5.0
LEASE_SECONDS = 30.0
_SIZE = 1024
"""Bytes of the file, padding included, so that a renewal never changes its size."""


@dataclass(frozen=True)
class Owner:
    """The process that saves into a folder."""

    host: str
    pid: int
    started: str
    """Start time of the process in clock ticks since the host was started; empty if the system does not report it."""
    machine: str
    """The same for two processes that see the same process ids: the boot of the host and the namespace."""
    token: str
    """Differs for each run."""
    run: str = ""
    """The elastic run that it belongs to: the same for all of its starts."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else f"its elastic agent on {self.host}"

    @property
    def is_displaced(self) -> bool:
        """Whether no process has the lock, since an elastic agent has taken it from its owner."""
        return self.pid == 0


class FolderLock:
    """The right to save into ``folder``, held by this process from ``take()`` to ``release()``.

    ``name`` is that of the file; another name is another right, and ``use`` says for messages what its owner does.
    ``when_lost`` is called, from another thread, with a message for the user once another process has the lock.
    """

    def __init__(
        self, folder: Path, name: str = LOCK, use: str = SAVES, when_lost: Callable[[str], object] | None = None
    ) -> None:
        self.folder, self._path, self._use, self._when_lost = folder, folder / name, use, when_lost
        place = (socket.gethostname(), os.getpid(), start_time(os.getpid()), machine_id())
        self._owner = Owner(*place, secrets.token_hex(8), os.environ.get(RUN_VARIABLE, ""))
        self._file, self._renewals = -1, 0
        self._over = threading.Event()

    def take(self) -> None:
        """Take the lock; wait for ``LEASE_SECONDS`` if its owner on another host may have ended.

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
        """Wait until the owner has ended without giving the lock back, and take it; False if it has given it back.

        Without an owner the lock is taken at once. Raises as ``take()``.
        """
        text, owner = _read(self._path)
        if text is not None:
            while text is not None and self._is_held(text, owner):
                time.sleep(_pause())
                text, owner = _read(self._path)
            if not os.path.lexists(self._path):
                return False
        self.take()
        return True

    def check(self) -> None:
        """Raises CheckpointError if another run has taken the folder over: this process was suspended for long.

        A file that cannot be read now says nothing; one that the user has deleted is made again.
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
        """Give the lock back, if it is still this process's."""
        self._over.set()
        _, owner = _read(self._path)
        with suppress(OSError):
            if owner is not None and owner.token == self._owner.token:
                self._path.unlink()

    def _create(self) -> bool:
        """Create the file; False if there is one."""
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
            with suppress(OSError):  # whether the file is still there is for check() to say
                self._write()
            owner = _read(self._path)[1]
            if self._when_lost and owner and owner.token != self._owner.token and not self._over.is_set():
                self._when_lost(self._lost_to(owner))

    def _is_held(self, text: str, owner: Owner | None, *, announced: bool = False) -> bool:
        """Whether the owner of the file, which contains ``text``, still runs; on another host, whether it renews it."""
        if owner is not None and _is_here(owner):
            return _is_alive(owner)
        if owner is not None and owner.is_displaced:
            return False
        if announced:
            whose = f"that of {owner}" if owner else "of another run"
            print_warning(f"--save {self.folder}: waiting up to {LEASE_SECONDS:.0f} s for a lock, {whose}, to expire")
        waited = 0.0
        while waited < LEASE_SECONDS:  # without the time of reading: the file system may be away, for its owner, too
            time.sleep(_pause())
            waited += _pause()
            if (now := _read(self._path)[0]) != text:
                return now is not None
        return False

    def _remove(self, stale: str) -> None:
        """Remove the file if it still contains ``stale``; of several processes that do, one takes the lock."""
        moved = self._path.with_name(f"{self._path.name}.{self._owner.token}{UNFINISHED}")
        with suppress(FileNotFoundError):
            os.rename(self._path, moved)
            if _read(moved)[0] != stale:  # another process was faster: it is not stale any more
                with suppress(OSError):
                    os.link(moved, self._path)
            moved.unlink()


def check_unlocked(folder: Path) -> None:
    """Raises CheckpointError if a running process of this host saves into ``folder``. Changes nothing."""
    _, owner = _read(folder / LOCK)
    if owner is not None and _is_here(owner) and _is_alive(owner):
        raise CheckpointError(_in_use(folder, owner))


def owner_of(folder: Path) -> Owner | None:
    """The process that has the right to save into ``folder``, whether it still runs or not; None if there is none."""
    return _read(folder / LOCK)[1]


def last_renewal(folder: Path, run: str) -> str | None:
    """What changes whenever the owner of the lock renews it; None if no process of the elastic ``run`` has it."""
    text, owner = _read(folder / LOCK)
    return text if owner is not None and owner.run == run and not owner.is_displaced else None


def displace(folder: Path, owner: Owner) -> None:
    """Take the lock from ``owner``, which has ended or cannot be reached: the next start may have it at once.

    Only for an owner that the caller has started, and replaces.
    """
    free = replace(owner, host=socket.gethostname(), pid=0, started="", machine="", token=secrets.token_hex(8))
    moved = folder / f"{LOCK}.{free.token}{UNFINISHED}"
    moved.write_text(json.dumps(asdict(free)))
    if _read(folder / LOCK)[1] == owner:
        os.replace(moved, folder / LOCK)
    moved.unlink(missing_ok=True)


def _pause() -> float:
    """Seconds between two looks at a lock."""
    return min(1.0, LEASE_SECONDS / 10)


def _in_use(folder: Path, owner: Owner | None, use: str = SAVES) -> str:
    by = f" ({owner})" if owner else ""
    return f"--save {folder}: another run{by} {use}; end it, or name another folder"


def _read(path: Path) -> tuple[str | None, Owner | None]:
    """Content of the file and the owner that it names. None for what is not there, or not legible."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            text = os.read(file, _SIZE).decode(errors="replace")
        finally:
            os.close(file)
    except FileNotFoundError:
        return None, None
    except OSError:
        return "", None
    try:
        content = parse_json(text)
        owner = Owner(**{name: content[name] for name in Owner.__dataclass_fields__ if name in content})
    except (ValueError, KeyError, TypeError):
        return text, None
    return text, owner if type(owner.pid) is int else None


def start_time(pid: int) -> str:
    """Start time of a process; empty if there is none, or it has ended and was not yet waited for."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def _is_here(owner: Owner) -> bool:
    return bool(owner.machine and owner.started) and owner.machine == machine_id()


def _is_alive(owner: Owner) -> bool:
    return start_time(owner.pid) == owner.started
