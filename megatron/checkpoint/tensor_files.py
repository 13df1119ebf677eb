"""Files of tensors, read without letting them run code."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpoint.file_structure import structure_problem
from megatron.checkpoint.files import NewFile, Record
from megatron.checkpoint.manifest import MANIFEST, check_content, read_manifest
from megatron.config.errors import CheckpointError, first_line

_ALLOWED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
"""Classes in DeepSpeed's files besides tensors and plain values. Creating them has no effects."""


def write_file(path: Path, content: Any) -> Record:
    """Write ``content`` to a new file, and flush it to disk. Raises OSError if it cannot be written."""
    file = NewFile(path)
    torch.save(content, file)  # type: ignore[arg-type]  # which calls write() and flush() alone
    return file.close()


def read_file(path: Path) -> Any:
    """The content of ``path``, on the CPU. A file that is in a manifest is compared with it first.

    Raises CheckpointError if the file is missing, changed or damaged, asks for code, or does not contain what its name
    says.
    """
    if (path.parent / MANIFEST).exists():
        manifest = read_manifest(path.parent)
        if path.name in manifest:
            check_content(path, manifest[path.name])
    return read_checked_file(path)


@contextmanager
def noted_files() -> Iterator[list[Path]]:
    """The files that are read inside, in order."""
    files: list[Path] = []
    _noting.append(files)
    try:
        yield files
    finally:
        _noting.remove(files)


_noting: list[list[Path]] = []


def read_checked_file(path: Path) -> Any:
    """The same for a file whose SHA-256 was compared before."""
    for files in _noting:
        files.append(path)
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file
        if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(_asks_for_code(path, unsafe[1])) from None
        raise CheckpointError(f"{path} cannot be read ({first_line(error)})") from error
    return _checked(path, content)


def check_structure(path: Path) -> None:
    """Raises CheckpointError as ``check_harmless``, or if ``path`` does not contain what its name says."""
    check_harmless(path)
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            # Tensors are mapped into memory, and so not read.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} is not a file of tensors ({first_line(error)})") from None
    _checked(path, content)


def _checked(path: Path, content: Any) -> Any:
    """``content``. Raises CheckpointError if a file with that name cannot have it."""
    if problem := structure_problem(path.name, content):
        raise CheckpointError(f"{path} cannot be used: {problem}")
    return content


def check_harmless(path: Path) -> None:
    """Raises CheckpointError if ``path`` is not a file of tensors, or asks for code. Reads no tensor."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise CheckpointError(f"{path} is not a file of tensors ({first_line(error)})") from None
    if unsafe:
        raise CheckpointError(_asks_for_code(path, ", ".join(sorted(unsafe))))


def _asks_for_code(path: Path, names: str) -> str:
    return f"{path} asks for {names}, which could run code; it is not loaded"
