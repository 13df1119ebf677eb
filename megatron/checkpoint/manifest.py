"""``manifest.json``: size and hash of each file of a checkpoint. It is written last, so it marks a complete one.

No torch here.

{"format": 1, "files": {"run.json": {"size": 4096, "xxh128": "…"}, …}, "sha256": "… of format and files"}

``xxh128`` is described in files.py. Earlier versions saved ``sha256`` as well; the earliest saved only that.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.checkpoint.files import Record, record_of, sha256_of, write_text, xxh128_of
from megatron.common.errors import CheckpointError
from megatron.common.files import sync, sync_folder
from megatron.common.reading import read_bytes

MANIFEST = "manifest.json"
FORMAT = 1

Manifest = Mapping[str, Record]
"""Path relative to the tag, with slashes -> record of the file."""


def write_manifest(tag_folder: Path, records: Manifest) -> None:
    """Mark the tag as complete. Files that ``records`` lacks are flushed to disk and read for theirs."""
    records = dict(records)
    for name in sorted(set(_names(tag_folder)) - set(records)):
        sync(tag_folder / name)
        records[name] = record_of(tag_folder / name)
    for folder in {(tag_folder / name).parent for name in records}:
        sync_folder(folder)
    write_text(tag_folder / MANIFEST, _render(records))
    sync_folder(tag_folder)


def read_manifest(tag_folder: Path) -> Manifest:
    """The files of a tag. Raises CheckpointError if its manifest is missing or damaged."""
    file = tag_folder / MANIFEST
    try:
        text = read_bytes(file).decode("utf-8")
        content = json.loads(text)
        form = content["format"]
        records = {
            name: Record(entry["size"], entry.get("sha256"), entry.get("xxh128"))
            for name, entry in content["files"].items()
        }
    except FileNotFoundError:
        raise CheckpointError(
            f"{tag_folder} has no {MANIFEST}, which is written last: the save was interrupted, or another program "
            "wrote the files"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged") from None
    if type(form) is int and form > FORMAT:
        raise CheckpointError(
            f"{file} has format {form}, but this version reads format {FORMAT}: use the version that saved it"
        )
    if not all(map(_is_possible, records.items())) or text != _render(records):
        raise CheckpointError(f"{file} is damaged")
    return records


def _is_possible(entry: tuple[str, Record]) -> bool:
    """Whether a file in the tag's folder can have this name and this record."""
    name, record = entry
    path = PurePosixPath(name)
    is_inside = name.isprintable() and not path.is_absolute() and ".." not in path.parts
    hashes = [digest for digest in (record.sha256, record.xxh128) if digest is not None]
    has_hashes = bool(hashes) and all(isinstance(digest, str) for digest in hashes)
    return is_inside and has_hashes and type(record.size) is int and record.size >= 0


def check_sizes(tag_folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError if a file is missing or has another size, or if there is a ``.pt`` file too many."""
    for name, record in manifest.items():
        _check_size(tag_folder / name, record)
    for name in _names(tag_folder):
        # DeepSpeed looks for its files by pattern, and would take this for one of them.
        if name.endswith(".pt") and name not in manifest:
            raise CheckpointError(f"{tag_folder / name} is not in the manifest: it was not saved with this checkpoint")


def check_content(file: Path, record: Record) -> None:
    """Raises CheckpointError if ``file`` is missing, or its size or content is not that of ``record``."""
    _check_size(file, record)
    try:
        kind, saved = ("xxh128", record.xxh128) if record.xxh128 else ("SHA-256", record.sha256)
        found = xxh128_of(file) if record.xxh128 else sha256_of(file)
    except OSError as error:
        raise CheckpointError(_unreadable(file, error)) from None
    if found != saved:
        raise CheckpointError(f"{file} is damaged: its {kind} differs from the one saved in {MANIFEST}")


def _check_size(file: Path, record: Record) -> None:
    try:
        status = os.stat(file)
    except OSError as error:
        raise CheckpointError(_unreadable(file, error)) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file} is not a file")
    size = status.st_size
    if size != record.size:
        raise CheckpointError(f"{file} has {size:,} bytes, but {record.size:,} were saved")


def _unreadable(file: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} is missing"
    return f"{file} cannot be read ({error.strerror})"


def _render(records: Manifest) -> str:
    files = {
        name: {key: value for key, value in records[name]._asdict().items() if value is not None}
        for name in sorted(records)
    }
    content: dict[str, Any] = {"format": FORMAT, "files": files}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


def _names(tag_folder: Path) -> Iterator[str]:
    for path in sorted(tag_folder.rglob("*")):
        name = path.relative_to(tag_folder).as_posix()
        if name != MANIFEST and not path.is_dir():
            yield name
