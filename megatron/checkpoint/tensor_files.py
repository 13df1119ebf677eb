"""Reading and writing a file of tensors, without letting it run code."""

import re
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpoint.files import NewFile, Record
from megatron.checkpoint.manifest import MANIFEST, check_content, read_manifest
from megatron.config.errors import CheckpointError

_ALLOWED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
"""What DeepSpeed's files need beside tensors and plain values. None of it does anything when it is made."""


def write_file(path: Path, content: Any) -> Record:
    """A new file of ``content``, which is on the disk. Raises OSError where the disk does not take it."""
    file = NewFile(path)
    torch.save(content, file)
    return file.close()


def read_file(path: Path) -> Any:
    """What ``path`` holds, on the CPU; of a tag with a manifest, only if it is what was saved.

    Raises CheckpointError where the file is missing, changed, not whole, or asks for code.
    """
    if (path.parent / MANIFEST).exists():
        manifest = read_manifest(path.parent)
        if path.name in manifest:
            check_content(path, manifest[path.name])
    return read_checked_file(path)


def read_checked_file(path: Path) -> Any:
    """What ``path`` holds, on the CPU, where its SHA-256 was compared before. Raises CheckpointError as above."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many names for a file that is not whole
        if wanted := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(_asks_for_code(path, wanted[1])) from None
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error


def check_harmless(path: Path) -> None:
    """Raises CheckpointError where ``path`` is no file of tensors, or one that asks for code. Reads no tensor."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            wanted = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise CheckpointError(f"{path} is no file of tensors ({str(error).splitlines()[0]})") from None
    if wanted:
        raise CheckpointError(_asks_for_code(path, ", ".join(sorted(wanted))))


def _asks_for_code(path: Path, names: str) -> str:
    return f"{path} asks for {names}, which no checkpoint needs: it was made to run code, and is not read"
