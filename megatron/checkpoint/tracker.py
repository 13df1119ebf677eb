"""The checkpoints of a folder: finds them, and selects the one to load. ``commit`` writes and removes them. No torch.

SAVE/latest                               name of the newest tag, read by DeepSpeed
SAVE/latest_checkpointed_iteration.txt    its iteration, read by Megatron
SAVE/global_stepN                         a complete checkpoint: run.json describes it, manifest.json lists its files
SAVE/global_stepN.partial                 being written or removed: nothing reads it, and the next save removes it
SAVE/global_stepN.replaced                the previous checkpoint of that name, while it is replaced
SAVE/.writer.lock                         the process that saves into the folder, see folder_lock.py

One process at a time changes a folder.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from megatron.checkpoint.compatibility import check_compatible
from megatron.checkpoint.manifest import MANIFEST, check_content, check_sizes, read_manifest, read_text
from megatron.checkpoint.run_file import RUN_FILE, SavedRun, checked_description
from megatron.checkpoint.sample_history import check_history
from megatron.common.errors import CheckpointError
from megatron.common.files import UNFINISHED
from megatron.common.reading import LARGEST_SETTINGS, is_present, parse_json
from megatron.config import RunConfig

LATEST = "latest"
TRACKER = "latest_checkpointed_iteration.txt"
UNIVERSAL = "_universal"
"""Suffix of the folder with the universal checkpoint of a tag."""
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{,199}")
STEP = re.compile(r"global_step([0-9]{1,18})")
"""The tag of an iteration."""
_MOST_RANKS = 1 << 20
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
    return any(is_present(folder / name) for name in (LATEST, TRACKER)) or bool(_tags(folder))


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
        problem = error.in_one_line
    complete, problems = [], [problem]
    for tag in _tags(folder):
        try:
            complete.append(_read(folder, tag, broken))
        except CheckpointError as error:
            problems.append(error.in_one_line)
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
    names = {path.name for path in folder.glob("global_step*") if STEP.fullmatch(path.name)}
    names |= {path.parent.name for path in folder.glob(f"*/{MANIFEST}")}
    return sorted(name for name in names if not name.endswith(UNFINISHED) and _TAG.fullmatch(name))


def _latest_tag(folder: Path) -> str:
    pointer = folder / LATEST
    tag = read_text(pointer, largest=1 << 12).strip()
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
        step = STEP.fullmatch(_latest_tag(folder))
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
    if (step := STEP.fullmatch(tag)) and int(step[1]) != description["iteration"]:
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
    if parts * partitions > _MOST_RANKS:
        has = f"the layout ({layout}) has {parts * partitions:,} ranks, more than {_MOST_RANKS:,}"
        raise CheckpointError(f"{saved.path / RUN_FILE}: {has}")
    for kind, size, files in (
        ("shards", shards, "tensor-parallel shards"),
        ("parts", parts, "model-parallel ranks"),
        ("partitions", partitions, "partitions of the optimizer"),
        ("ranks", parts * partitions, "ranks with random states"),
    ):
        if kind in found and (len(found[kind]), max(found[kind])) != (size, size - 1):
            has = f"the layout ({layout}) has {size} {files}, but there are files of {len(found[kind])}"
            raise CheckpointError(f"{saved.path / RUN_FILE}: {has}")
