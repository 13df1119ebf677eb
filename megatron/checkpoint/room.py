"""Whether the disk takes a checkpoint: asked before, and put into words when it did not. No torch here."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron.errors import CheckpointError, ResourceError, UserError

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(folder: Path, what: str, size: int) -> None:
    """Raises ResourceError where the disk of ``folder`` has not ``size`` bytes for ``what``."""
    if size > shutil.disk_usage(folder).free:
        raise ResourceError(_no_room(folder, what, size))


def on_disk(step: Callable[[], T], folder: Path, what: str, size: int) -> Callable[[], T]:
    """``step``, which writes ``what`` of ``size`` bytes, with OSError turned into a UserError."""

    def guarded() -> T:
        try:
            return step()
        except OSError as error:
            raise _refusal(error, folder, what, size) from error

    return guarded


def _refusal(error: OSError, folder: Path, what: str, size: int) -> UserError:
    if error.errno in _FULL:
        return ResourceError(_no_room(folder, what, size, f" ({error.strerror})"))
    where = f"{error.filename}: " if error.filename else ""
    return CheckpointError(
        f"--save {folder}: {what} cannot be written ({where}{error.strerror or error}): "
        "see what became of the disk, or name another folder"
    )


def _no_room(folder: Path, what: str, size: int, cause: str = "") -> str:
    free = shutil.disk_usage(folder if os.path.isdir(folder) else folder.absolute().anchor).free
    return (
        f"--save {folder}: {what} needs {size:,} bytes, and the disk has {free:,} free"
        f"{cause}: free some space, keep fewer checkpoints with --keep-last, or name another folder"
    )
