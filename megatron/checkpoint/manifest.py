"""The manifest of a checkpoint: reads and writes it, and compares the files of a checkpoint with it. No torch here.

``manifest.json`` has size and hash of each file of a checkpoint. It is written last, so it marks a complete checkpoint:

{"format": 1, "files": {"run.json": {"size": 4096, "xxh128": "…"}, …}, "sha256": "… of format and files"}

Earlier versions saved a ``sha256`` of each file as well; the earliest saved only that.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import Record, record_of, sha256_of, write_text, xxh128_of
from megatron.common.checkpoint_folders import MANIFEST
from megatron.common.errors import CheckpointError, limit_reached
from megatron.common.files import sync, sync_folder
from megatron.common.reading import LARGEST_JSON, read_bytes

FORMAT = 1
_ASKED_AT_ONCE = 16
"""Number of concurrent requests for file sizes, since network file systems answer slowly."""

Manifest = Mapping[str, Record]
"""Records of files by their path relative to the tag, with slashes."""


def write_manifest(tag_folder: Path, records: Manifest) -> None:
    """Mark the tag as complete. Files that are missing in ``records`` are flushed to disk and hashed."""
    records = dict(records)
    for name in sorted(set(_names(tag_folder)) - set(records)):
        sync(tag_folder / name)
        records[name] = record_of(tag_folder / name)
    for folder in {(tag_folder / name).parent for name in records}:
        sync_folder(folder)
    write_text(tag_folder / MANIFEST, _render(records))
    sync_folder(tag_folder)


def read_manifest(tag_folder: Path) -> Manifest:
    """Read the manifest of a tag. Raises CheckpointError if it is missing or damaged."""
    file = tag_folder / MANIFEST
    reason = "the save was interrupted, or another program wrote the files"
    text = read_text(file, absent=f"{tag_folder} has no {MANIFEST}, which is written last: {reason}")
    try:
        content = json.loads(text)
        form = content["format"]
        records = {name: _record(**entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged") from None
    if type(form) is int and form > FORMAT:
        raise CheckpointError(
            f"{file} has format {form}, but this version reads format {FORMAT}: use the version that saved it"
        )
    if text != _render(records) or any(os.path.isabs(name) or ".." in name.split("/") for name in records):
        raise CheckpointError(f"{file} is damaged")
    return records


def _record(size: Any, sha256: Any = None, xxh128: Any = None, **_: Any) -> Record:
    """The record in a manifest. Raises TypeError for one of other types."""
    if type(size) is not int or not all(isinstance(digest, str | None) for digest in (sha256, xxh128)):
        raise TypeError
    return Record(size, sha256, xxh128)


def read_text(file: Path, *, largest: int = LARGEST_JSON, absent: str | None = None) -> str:
    """The content of a text file of a checkpoint.

    Raises CheckpointError if it cannot be read or is larger than ``largest``; ``absent`` is the message if it is
    missing.
    """
    if not file.parent.exists():
        raise gone(file.parent)
    try:
        with _read_errors(file, absent):
            return read_bytes(file, largest=largest).decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8 text") from None


def gone(place: Path) -> CheckpointError:
    """The error that ``place`` no longer exists."""
    return CheckpointError(f"{place} is gone: a run with --keep-last may have removed it meanwhile")


def check_sizes(tag_folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a file is missing or has a wrong size, or if there is an extra ``.pt`` file."""
    with ThreadPoolExecutor(_ASKED_AT_ONCE, "size") as threads:
        for _ in threads.map(lambda name: _check_size(tag_folder / name, manifest[name]), manifest):
            pass
    for name in _names(tag_folder):
        # DeepSpeed finds its files by pattern, and would load this one, too.
        if name.endswith(".pt") and name not in manifest:
            raise CheckpointError(f"{tag_folder / name} is not in the manifest: it was not saved with this checkpoint")


def check_content(file: Path, record: Record) -> None:
    """Raise CheckpointError if ``file`` is missing, or its size or content differs from ``record``."""
    _check_size(file, record)
    kind, saved = ("xxh128", record.xxh128) if record.xxh128 else ("SHA-256", record.sha256)
    with _read_errors(file):
        found = xxh128_of(file) if record.xxh128 else sha256_of(file)
    if found != saved:
        raise CheckpointError(f"{file} is damaged: its {kind} differs from the one saved in {MANIFEST}")


def _check_size(file: Path, record: Record) -> None:
    with _read_errors(file):
        status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a file")
    if status.st_size != record.size:
        raise CheckpointError(f"{file} has {status.st_size:,} bytes, but {record.size:,} were saved")


@contextmanager
def _read_errors(file: Path, absent: str | None = None) -> Iterator[None]:
    """Turn an OSError in the block, which reads ``file``, into a CheckpointError, ``absent`` if it is missing.

    An error about a limit of the host becomes a ResourceError: the file may be whole.
    """
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(absent or f"{file} is missing") from None
    except OSError as error:
        raise (limit_reached(file, error) or CheckpointError(f"{file} cannot be read ({error.strerror})")) from None


def _render(records: Manifest) -> str:
    files = {
        name: {key: value for key, value in records[name]._asdict().items() if value is not None}
        for name in sorted(records)
    }
    content: dict[str, Any] = {"format": FORMAT, "files": files}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


def _names(tag_folder: Path) -> Iterator[str]:
    for folder, _, files in os.walk(tag_folder):
        for name in files:
            if (path := os.path.relpath(os.path.join(folder, name), tag_folder)) != MANIFEST:
                yield path
