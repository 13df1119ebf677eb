"""Files that several processes share, or that outlive the one that wrote them: locks, syncs, replacing at once."""

import fcntl
import os
from pathlib import Path
from typing import IO


def take_lock(file: IO, *, wait: bool) -> bool:
    """Lock an open file until it is closed, as the kernel does even for a killed process.

    Returns False if another process holds the lock and ``wait`` is off. File systems without locks
    always answer True, so a lock may save work or warn, but nothing may depend on it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Bring new names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Give ``path`` another content, at one instant, and bring it to disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
