"""Whether the files of a tag are those that were saved. No torch here."""

import hashlib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.checkpoint.exchange.kinds import read_json
from megatron.checkpoint.tracker import SavedRun
from megatron.errors import CheckpointError

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


def verify_weights(saved: SavedRun) -> None:
    """Raise CheckpointError as ``verify`` does, for the files that the weights are read from."""
    verify(saved.folder / saved.tag, "*" if saved.description["layout"]["--zero-stage"] == 3 else "*model_states.pt")


def verify(tag_folder: Path, pattern: str = "*") -> str:
    """What comes of comparing the files that match ``pattern`` with the sizes and SHA-256 of the manifest, in words.

    Raises CheckpointError with a line for each file that is missing or another than the one that was saved.
    """
    if not (tag_folder / MANIFEST).exists():
        return "no manifest: what was saved is not known"
    try:
        files = {
            tag_folder / name: (int(entry["size"]), entry["sha256"])
            for name, entry in _entries(tag_folder)
            if fnmatch(name, pattern)
        }
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{tag_folder / MANIFEST} is not as it was written") from None
    problems = [text for file, (size, _) in files.items() if (text := _size_problem(file, size))]
    if problems:
        raise CheckpointError(problems)
    total = sum(size for size, _ in files.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="checking", disable=None) as progress:
        problems = [
            f"{file} is not what was saved: its SHA-256 is not the one in {MANIFEST}"
            for file, (_, digest) in files.items()
            if _digest(file, progress) != digest
        ]
    if problems:
        raise CheckpointError(problems)
    return f"yes: {len(files)} files, {total:,} bytes, as {MANIFEST} says"


def _entries(tag_folder: Path) -> list[tuple[str, Any]]:
    return list(read_json(tag_folder / MANIFEST)["files"].items())


def _size_problem(file: Path, size: int) -> str | None:
    try:
        found = file.stat().st_size
    except OSError as error:
        return f"{file} is missing" if isinstance(error, FileNotFoundError) else f"{file}: {error.strerror}"
    return None if found == size else f"{file} has {found:,} bytes, and {size:,} were saved"


def _digest(file: Path, progress: tqdm) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            progress.update(len(chunk))
    return digest.hexdigest()
