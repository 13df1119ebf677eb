"""Detects the format of a checkpoint, and reads its metadata without reading weights. No torch here."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import safetensors

from megatron.checkpoint.manifest import MANIFEST, check_content, read_manifest
from megatron.checkpoint.run_file import RUN_FILE, SavedRun, checked_description
from megatron.checkpoint.safetensors_files import INDEX_SUFFIX, SAFETENSORS, broken, files_with
from megatron.checkpoint.tracker import LATEST, TRACKER, newest, tag_at
from megatron.common.errors import CheckpointError, counted
from megatron.common.reading import check_regular, is_present, parse_json
from megatron.config import ModelConfig
from megatron.model.huggingface import HF_CONFIG
from megatron.model.huggingface import read_config as read_folder_config
from megatron.tools.command_line import progress_bar


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint at a path, and its format."""

    path: Path
    kind: str
    """A name in ``KINDS``."""
    saved: SavedRun | None = None
    """The checkpoint of this suite at the path, or to which the path points."""

    @property
    def what(self) -> str:
        """The name of the kind in messages."""
        return KINDS[self.kind].title


@dataclass(frozen=True)
class Kind:
    """A format of checkpoints: its name in messages, and functions that recognize and open it."""

    title: str
    matches: Callable[[Path], bool]
    saved: Callable[[Path], SavedRun | None] = lambda path: None


def _is_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors" and path.is_file() or _has(SAFETENSORS, SAFETENSORS + INDEX_SUFFIX)(path)


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: any(os.path.lexists(path / name) for name in names)


def _is_folder(path: Path) -> bool:
    return _has(LATEST, TRACKER)(path) or path.is_dir() and any(path.glob(f"*/{RUN_FILE}"))


def _source_tag(path: Path) -> SavedRun | None:
    """The tag from which a universal checkpoint was converted, next to it."""
    tag = path.with_name(path.name.removesuffix("_universal"))
    return next((tag_at(folder) for folder in (path, tag) if (folder / RUN_FILE).exists()), None)


KINDS = {
    "universal": Kind("a universal checkpoint", _has("zero"), _source_tag),
    "tag": Kind("one checkpoint", _has(RUN_FILE), tag_at),
    "folder": Kind("a folder of checkpoints", _is_folder, newest),
    "huggingface": Kind(f"a Hugging Face folder (with {HF_CONFIG})", _has(HF_CONFIG)),
    "safetensors": Kind("weights in one piece (safetensors)", _is_safetensors),
}
"""Formats by name, in the order in which they are tried."""


def find(path: Path) -> FoundCheckpoint:
    """Detect the format of the checkpoint at ``path``.

    Raises CheckpointError if there is no known format, or an incomplete checkpoint of this suite.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; name a checkpoint")
    path = path.resolve() if path.name in ("", "..") else path  # the name of a tag is needed
    for name, kind in KINDS.items():
        if kind.matches(path):
            return FoundCheckpoint(path, name, kind.saved(path))
    if path.is_dir() and any(path.glob("*_model_states.pt")):
        tag_at(path)  # raises with what is missing
    raise CheckpointError(
        f"{path} is not a checkpoint: it has neither {LATEST} nor {RUN_FILE}, {HF_CONFIG}, {SAFETENSORS} or zero/"
    )


_FILES_AT_ONCE = 4
"""Files that are checked at the same time; several threads read each of them."""


def verify(tag_folder: Path, pattern: str = "*") -> str:
    """Compare the files that match ``pattern`` with the sizes and hashes in the manifest. Returns a summary.

    Raises CheckpointError with a line for each file that is missing or damaged.
    """
    manifest = {name: record for name, record in read_manifest(tag_folder).items() if fnmatch(name, pattern)}
    total = sum(record.size for record in manifest.values())
    problems: list[str] = []

    def check(name: str) -> list[str]:
        try:
            check_content(tag_folder / name, manifest[name])
        except CheckpointError as error:
            return error.messages
        return []

    bar = progress_bar(total=total, unit="B", unit_scale=True, desc="checking")
    with bar as progress, ThreadPoolExecutor(_FILES_AT_ONCE, "verify") as threads:
        for name, messages in zip(manifest, threads.map(check, manifest), strict=True):
            problems += messages
            progress.update(manifest[name].size)
    if problems:
        raise CheckpointError(problems)
    return f"yes: {counted(len(manifest), 'file')}, {total:,} bytes, as {MANIFEST} says"


def integrity(checkpoint: FoundCheckpoint) -> str:
    """Verify the files, and return a line about the result. Raises CheckpointError if they are damaged."""
    if checkpoint.kind == "universal" and is_present(checkpoint.path / "zero" / MANIFEST):
        return verify(checkpoint.path / "zero")
    if checkpoint.saved and checkpoint.kind != "universal":
        return verify(checkpoint.saved.path)
    return "no manifest: what was saved is not known"


RUN_KEY = "run"
"""Key in the header of merged weights that contains ``run.json``."""


def read_config(checkpoint: FoundCheckpoint) -> ModelConfig | None:
    """The configuration of the model; None if the checkpoint does not contain it."""
    if checkpoint.kind == "huggingface":
        return read_folder_config(checkpoint.path)
    description = read_description(checkpoint)
    if description is None:
        return None
    config = SavedRun(checkpoint.path.parent, checkpoint.path.name, description).full_model_config()
    if description["config"]["data"].get("sft"):  # segment ids come from the data: a prompt has none
        return replace(config, reset_attention_mask=False, reset_position_ids=False)
    return config


def read_description(checkpoint: FoundCheckpoint) -> Mapping[str, Any] | None:
    """The ``run.json`` of the training run, which merged weights have in their header; None for other programs."""
    if checkpoint.kind != "safetensors":
        return checkpoint.saved.description if checkpoint.saved else None
    try:
        description = parse_json(_header(checkpoint.path)[RUN_KEY])
    except (KeyError, ValueError):
        raise CheckpointError(
            f"{checkpoint.path} does not describe its model; files of merge do, and from-hf reads a folder with "
            "config.json"
        ) from None
    return checked_description(description, str(checkpoint.path))


def _header(path: Path) -> dict[str, str]:
    """The metadata in the header of a safetensors file, or of each file of a folder. Raises CheckpointError if they
    are of several runs."""
    headers: dict[Path, dict[str, str]] = {}
    for file in files_with(path, SAFETENSORS):
        try:
            check_regular(file)
            with safetensors.safe_open(file, framework="np") as opened:
                headers[file] = opened.metadata() or {}
        except (safetensors.SafetensorError, OSError) as error:
            raise broken(file, error) from None
    (first, header), *others = headers.items()
    for file, other in others:
        if other.get(RUN_KEY) != header.get(RUN_KEY):
            raise CheckpointError(
                f"{file} is of another run or iteration than {first.name}: copy all files of one merge"
            )
    return header
