"""The life of a tag: filled under another name, made visible in one instant, taken away. By one process; no torch here.

SAVE/global_stepN.partial     being filled, or being taken away: no one reads it, and the next save removes it
SAVE/global_stepN             whole
SAVE/global_stepN.replaced    what had that name before, from the instant before it is taken to the one after
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import FOLDER_MODE, UNFINISHED, make_folder, sync_folder
from megatron.checkpoint.manifest import MANIFEST, Manifest
from megatron.checkpoint.tracker import UNIVERSAL, publish, write_description
from megatron.config import CheckpointConfig

_REPLACED = ".replaced"
_STEP = re.compile(r"global_step(\d+)")


def tag_of(iteration: int) -> str:
    """The name of a checkpoint."""
    return f"global_step{iteration}"


def unfinished(tag: str) -> str:
    """The name under which ``tag`` is filled."""
    return tag + UNFINISHED


def begin(folder: Path, tag: str) -> Path:
    """The empty folder to fill. Removes what saves that were killed have left, and undoes half a replacement."""
    make_folder(folder)
    prune(folder)
    for replaced in folder.glob(f"global_step*{_REPLACED}"):
        if not os.path.lexists(replaced.with_suffix("")):
            os.rename(replaced, replaced.with_suffix(""))
    place = folder / unfinished(tag)
    place.mkdir(FOLDER_MODE)
    return place


def commit(folder: Path, tag: str, description: dict[str, Any], records: Manifest) -> None:
    """Make the filled tag whole, visible, and the one that the trackers name.

    Whenever this is cut short, ``folder`` holds every tag it held before, and the trackers name a whole one.
    """
    place, final = folder / unfinished(tag), folder / tag
    write_description(place, description, records)
    if os.path.lexists(final):
        os.rename(final, final.with_name(tag + _REPLACED))
    os.rename(place, final)
    sync_folder(folder)
    publish(folder, tag, description["iteration"])
    for replaced in folder.glob(f"global_step*{_REPLACED}"):
        if replaced.with_suffix("").exists():
            _remove(replaced)


def discard(folder: Path, tag: str) -> None:
    """Remove what was filled of a tag that failed, as far as the disk allows; the next ``begin()`` does the rest."""
    shutil.rmtree(folder / unfinished(tag), ignore_errors=True)


def prune(folder: Path) -> None:
    """Remove what is unfinished, if there is such a folder."""
    for pattern in ("global_step*", ".*"):
        for path in folder.glob(pattern + UNFINISHED):
            _remove(path)


def retain(folder: Path, iteration: int, config: CheckpointConfig) -> None:
    """Take away the tags before ``iteration`` that ``--keep-last`` and ``--keep-every`` do not keep."""
    if config.keep_last is None:
        return
    steps = sorted(step for step in _whole_steps(folder) if step <= iteration)
    for step in steps[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            _take_away(folder, tag_of(step))


def _whole_steps(folder: Path) -> list[int]:
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    return [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]


def _take_away(folder: Path, tag: str) -> None:
    """Remove a tag that is whole: its name goes first, so that nobody finds half of it."""
    os.rename(folder / tag, folder / unfinished(tag))
    sync_folder(folder)
    _remove(folder / unfinished(tag))
    _remove(folder / f"{tag}{UNIVERSAL}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
