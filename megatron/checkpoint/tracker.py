"""The checkpoints of a folder: selects the one to load; creates, commits and removes them. No torch here.

SAVE/latest                               name of the newest tag, read by DeepSpeed
SAVE/latest_checkpointed_iteration.txt    its iteration, read by Megatron
SAVE/global_stepN                         a complete checkpoint: run.json describes it, manifest.json lists its files
SAVE/global_stepN.partial                 being written or removed: nothing reads it, and the next save removes it
SAVE/global_stepN.replaced                the previous checkpoint of that name, while it is replaced
SAVE/.writer.lock                         the process that saves into the folder, see folder_lock.py

One process at a time changes a folder.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.compatibility import check_compatible
from megatron.checkpoint.files import make_folder, replace_text, write_text
from megatron.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_content,
    check_sizes,
    read_manifest,
    read_text,
    write_manifest,
)
from megatron.checkpoint.run_file import RUN_FILE, SavedRun, checked_description
from megatron.checkpoint.sample_history import check_history
from megatron.common.errors import CheckpointError
from megatron.common.files import UNFINISHED, folder_mode, sync_folder
from megatron.common.reading import LARGEST_SETTINGS, parse_json
from megatron.config import CheckpointConfig, RunConfig
from megatron.launch.rank import print_warning

LATEST = "latest"
TRACKER = "latest_checkpointed_iteration.txt"
UNIVERSAL = "_universal"
"""Suffix of the folder with the universal checkpoint of a tag."""
_REPLACED = ".replaced"
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{,199}")
_STEP = re.compile(r"global_step([0-9]{1,18})")
_FOLDERS_AT_ONCE = 16
"""Number of folders that are removed concurrently, while all ranks wait."""
_NONE_BROKEN: Mapping[str, str] = MappingProxyType({})


def tag_name(iteration: int) -> str:
    """The tag of the checkpoint after ``iteration``."""
    return f"global_step{iteration}"


def resolve(run: RunConfig, broken: Mapping[str, str] = _NONE_BROKEN) -> SavedRun | None:
    """The checkpoint that ``run`` loads, or None for a fresh start; ``broken`` as for ``newest``.

    Raises CheckpointError if no checkpoint exists or is complete, or if it is not compatible with the run.
    """
    config = run.checkpoint
    folder = config.save if config.auto_resume and config.save and holds_checkpoint(Path(config.save)) else config.load
    if folder is None:
        return None
    is_also_save = config.save is not None and Path(folder).resolve() == Path(config.save).resolve()
    if (is_also_save or config.auto_resume) and not holds_checkpoint(Path(folder)):
        return None
    saved = newest(folder, strict=config.load_strict, broken=broken)
    check_compatible(saved, run)
    return saved


def holds_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` contains a checkpoint, complete or not."""
    return (folder / LATEST).exists() or (folder / TRACKER).exists() or bool(_tags(folder))


def replaces_others(run: RunConfig, saved: SavedRun | None) -> bool:
    """Whether ``--save`` has checkpoints that ``run``, which loads ``saved``, does not continue."""
    config = run.checkpoint
    if config.save is None or not holds_checkpoint(Path(config.save)):
        return False
    return saved is None or config.finetune or saved.folder.resolve() != Path(config.save).resolve()


def newest(folder: str | Path, *, strict: bool = False, broken: Mapping[str, str] = _NONE_BROKEN) -> SavedRun:
    """The checkpoint in ``folder/latest``; if it is damaged, and not ``strict``, the newest complete one.

    A checkpoint is complete if it has a manifest, and all files in it with the right size. ``broken`` maps tags whose
    files are known to be damaged to the reason. Raises CheckpointError if there is none.
    """
    folder = Path(folder)
    if not holds_checkpoint(folder):
        problem = f"--load {folder}: no checkpoint there"
        if (folder / "config.json").is_file():
            raise CheckpointError(f"{problem}, but a Hugging Face folder: train on from it with --load-hf")
        if (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"--load {folder}: this is one checkpoint; name its folder: --load {folder.parent}; to go back to it, "
                f"write {folder.name} into {folder.parent / LATEST}"
            )
        raise CheckpointError(f"{problem}; name a folder that contains one")
    try:
        return _read(folder, _latest_tag(folder), broken)
    except CheckpointError as error:
        problem = str(error)
    complete, problems = [], [problem]
    for tag in _tags(folder):
        try:
            complete.append(_read(folder, tag, broken))
        except CheckpointError as error:
            problems.append(str(error))
    if not complete:
        if any(folder.glob("iter_*/")):
            raise CheckpointError(
                f"--load {folder}: a checkpoint of Megatron-LM: tools/convert_checkpoint.py from-megatron converts it"
            )
        raise CheckpointError(f"{problem}; no complete checkpoint is left in {folder}")
    saved = max(complete, key=lambda saved: saved.iteration)
    if strict:
        raise CheckpointError(
            f"{problem}; the newest complete checkpoint is {saved.tag}: to use it, remove --load-strict"
        )
    return replace(saved, newer_problems=tuple(dict.fromkeys(problems)))


def tag_at(path: Path) -> SavedRun:
    """The checkpoint in the folder ``path``. Raises CheckpointError if it is not complete."""
    return _read(path.parent, path.name, _NONE_BROKEN)


def _tags(folder: Path) -> list[str]:
    """Names of folders that may be checkpoints, complete or not."""
    names = {path.name for path in folder.glob("global_step*") if _STEP.fullmatch(path.name)}
    names |= {path.parent.name for path in folder.glob(f"*/{MANIFEST}")}
    return sorted(name for name in names if not name.endswith(UNFINISHED) and _TAG.fullmatch(name))


_LARGEST_POINTER = 1 << 12
"""Maximum bytes of ``latest``, which has the name of a folder."""


def _latest_tag(folder: Path) -> str:
    pointer = folder / LATEST
    tag = read_text(pointer, largest=_LARGEST_POINTER).strip()
    if not _TAG.fullmatch(tag):
        raise CheckpointError(f"{pointer} contains {tag[:40]!r}, which is not the name of a checkpoint")
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{pointer} names {tag}, which is not in {folder}")
    return tag


def latest_iteration(folder: Path) -> int | None:
    """The iteration of the checkpoint that ``latest`` names; None if it names none, 0 if ``folder`` has none."""
    if not holds_checkpoint(folder):
        return 0
    try:
        step = _STEP.fullmatch(_latest_tag(folder))
    except CheckpointError:
        return None
    return int(step[1]) if step else None


def _read(folder: Path, tag: str, broken: Mapping[str, str]) -> SavedRun:
    """Read the checkpoint ``tag``. Raises CheckpointError with the reason if it is not complete."""
    if tag in broken:
        raise CheckpointError(broken[tag])
    path = folder / tag
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    if RUN_FILE not in manifest:
        raise CheckpointError(f"{path} has no {RUN_FILE}: it is not a checkpoint of a training run")
    check_content(path / RUN_FILE, manifest[RUN_FILE])
    try:
        description = parse_json(read_text(path / RUN_FILE, largest=LARGEST_SETTINGS))
    except ValueError:
        description = None
    description = checked_description(description, str(path / RUN_FILE))
    if (step := _STEP.fullmatch(tag)) and int(step[1]) != description["iteration"]:
        raise CheckpointError(f"{path} holds iteration {description['iteration']}: its folder was copied or renamed")
    check_history(description, str(path / RUN_FILE))
    saved = SavedRun(folder, tag, description)
    check_layout(saved, manifest)
    return saved


_NUMBERED = re.compile(
    r"rng_state_(?P<ranks>\d+)\.pt|layer_\d+-model_(?P<shards>\d+)-model_states\.pt"
    r"|\w*zero_pp_rank_(?P<partitions>\d+)_mp_rank_\d+_optim_states\.pt|\w*mp_rank_(?P<parts>\d+)_model_states\.pt"
)


def check_layout(saved: SavedRun, names: Iterable[str]) -> None:
    """Raise CheckpointError if the files ``names`` are from more or fewer ranks than the checkpoint's layout has."""
    layout, found = saved.layout, defaultdict[str, set[int]](set)
    for name in names:
        if match := _NUMBERED.fullmatch(name.rpartition("/")[2]):
            found[str(match.lastgroup)].add(int(match[match.lastindex or 0]))
    shards, partitions = layout.model_parallel_size, layout.zero_ranks
    parts = shards * max(layout.pipe_parallel_size, 1)
    expected = {"shards": shards, "parts": parts, "partitions": partitions, "ranks": parts * partitions}
    for kind, size in expected.items():
        if kind in found and found[kind] != set(range(size)):
            raise CheckpointError(
                f"{saved.path / RUN_FILE}: the layout ({layout}) has {size} {_FILES[kind]}, but there are files of "
                f"{len(found[kind])}"
            )


_FILES = {
    "ranks": "ranks with random states",
    "shards": "tensor-parallel shards",
    "parts": "model-parallel ranks",
    "partitions": "partitions of the optimizer",
}


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
            _remove(replaced)
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
            _remove(path)


def _remove_old_tags(folder: Path, iteration: int, config: CheckpointConfig) -> None:
    """Remove the checkpoints before ``iteration`` that ``--keep-last`` and ``--keep-every`` do not keep."""
    if config.keep_last is None:
        return
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    steps = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)) and int(match[1]) <= iteration)
    for step in steps[: -config.keep_last]:
        if config.keep_every is None or step % config.keep_every:
            # Rename it first, so that no program finds a partial checkpoint.
            path = folder / tag_name(step)
            removed = unfinished(folder, path.name)
            os.rename(path, removed)
            sync_folder(folder)
            _remove(removed)
            _remove(folder / f"{path.name}{UNIVERSAL}")


def _remove(path: Path) -> None:
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
        print_warning(f"{path} cannot be removed ({error.strerror}); the next save tries again")
