"""Creates, commits and removes checkpoints: a kill at any moment leaves a complete one. No torch here.

The names in the folder are those of ``tracker``.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import make_folder, replace_text, write_text
from megatron.checkpoint.manifest import MANIFEST, Manifest, check_sizes, write_manifest
from megatron.checkpoint.run_file import RUN_FILE
from megatron.checkpoint.tracker import LATEST, STEP, TRACKER, UNIVERSAL, tag_name
from megatron.common.files import UNFINISHED, folder_mode, sync_folder
from megatron.config import CheckpointConfig
from megatron.launch.rank import print_warning

_REPLACED = ".replaced"
_FOLDERS_AT_ONCE = 16
"""Number of folders that are removed concurrently, while all ranks wait."""


def begin_tag(folder: Path, tag: str) -> Path:
    """Create the empty folder to write ``tag`` into. Cleans up after saves that were killed."""
    make_folder(folder)
    remove_unfinished(folder)
    _settle_replaced(folder)
    path = unfinished(folder, tag)
    path.mkdir(folder_mode())
    return path


def unfinished(folder: Path, tag: str) -> Path:
    """The folder that ``tag`` is written into."""
    return folder / (tag + UNFINISHED)


def commit_tag(folder: Path, iteration: int, records: Manifest, config: CheckpointConfig) -> None:
    """Complete the written tag, rename it, point the trackers to it, and remove tags that ``config`` does not keep.

    ``records`` has the records of its files. If it is killed at any step, the trackers point to a complete checkpoint.
    Raises CheckpointError if files are missing, as after a host has lost the shared folder.
    """
    tag = tag_name(iteration)
    path, final = unfinished(folder, tag), folder / tag
    check_sizes(path, records)
    write_manifest(path, records)
    if os.path.lexists(final):
        os.rename(final, final.with_name(tag + _REPLACED))
    os.rename(path, final)
    sync_folder(folder)
    publish(folder, tag, iteration)
    _settle_replaced(folder)
    _remove_old_tags(folder, iteration, config)


def _settle_replaced(folder: Path) -> None:
    """Remove each checkpoint that has been replaced; one whose replacement is missing gets its name back."""
    for replaced in folder.glob(f"global_step*{_REPLACED}"):
        if os.path.lexists(tag := replaced.with_suffix("")):
            remove_path(replaced)
        else:
            os.rename(replaced, tag)


def write_description(tag_folder: Path, description: dict[str, Any]) -> None:
    """Write ``run.json`` and then the manifest, which marks the checkpoint as complete and hashes all its files."""
    write_text(tag_folder / RUN_FILE, json.dumps(description, indent=2) + "\n")
    write_manifest(tag_folder, {})


def publish(folder: Path, tag: str, iteration: int) -> None:
    """Point both tracker files to ``tag``, each atomically."""
    replace_text(folder / LATEST, tag)
    replace_text(folder / TRACKER, str(iteration))


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files and tags, if ``folder`` exists."""
    for pattern in ("global_step*", ".*"):
        for path in folder.glob(pattern + UNFINISHED):
            remove_path(path)


def _remove_old_tags(folder: Path, iteration: int, config: CheckpointConfig) -> None:
    """Remove the checkpoints before ``iteration`` that ``--keep-last`` and ``--keep-every`` do not keep."""
    if config.keep_last is None:
        return
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    steps = sorted(int(match[1]) for name in names if (match := STEP.fullmatch(name)) and int(match[1]) <= iteration)
    for step in steps[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            # Rename it first, so that no program finds a partial checkpoint.
            path = folder / tag_name(step)
            removed = unfinished(folder, path.name)
            os.rename(path, removed)
            sync_folder(folder)
            remove_path(removed)
            remove_path(folder / f"{path.name}{UNIVERSAL}")


def remove_path(path: Path) -> None:
    """Remove what is not needed. What cannot be removed, such as a file that is open on NFS, stays, with a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            with os.scandir(path) as entries, ThreadPoolExecutor(_FOLDERS_AT_ONCE, "remove") as threads:
                folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
                list(threads.map(shutil.rmtree, folders))
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        print_warning(f"{path} cannot be removed ({error.strerror}); the next save or conversion tries again")
