"""Named tensors in one file or in several with an index, as the Hugging Face libraries name them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from megatron.checkpoint.tensor_files import read_file
from megatron.config.errors import CheckpointError, ResourceError
from megatron.tools.convert.kinds import INDEX_SUFFIX, SAFETENSORS, broken, read_json, shards_of

PICKLED = "pytorch_model.bin"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the files that ``path`` holds as a folder.

    Raises CheckpointError where a file or a tensor is missing, or a file is not whole.
    """
    if path.is_file():
        return _read_one(path)
    for name in (SAFETENSORS, PICKLED):
        if (path / name).exists():
            return _read_one(path / name)
        if (path / (name + INDEX_SUFFIX)).exists():
            return _read_indexed(path / (name + INDEX_SUFFIX))
    raise CheckpointError(f"{path}: neither {SAFETENSORS} nor {PICKLED} there, whole or with an index")


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, *, max_shard_size: int, metadata: Mapping[str, str]
) -> list[Path]:
    """Write safetensors files of at most so many bytes each, with an index where there are several.

    A tensor that is larger by itself has a file of its own. ``folder`` is made where it is not there. Raises
    ResourceError where the disk has no room.
    """
    folder.mkdir(exist_ok=True)
    check_room(folder, tensors)
    shards = split(tensors, max_shard_size)
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {key: name for shard, name in zip(shards, names, strict=True) for key in shard},
        }
        (folder / (SAFETENSORS + INDEX_SUFFIX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for shard, name in tqdm(zip(shards, names, strict=True), total=len(names), desc="writing", disable=None):
        write_file(shard, folder / name, metadata)
    return [folder / name for name in names]


def write_file(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file. Raises ResourceError where the disk has no room."""
    check_room(file.parent, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    file.touch()
    mode = file.stat().st_mode
    save_file(contiguous, file, {"format": "pt", **metadata})
    file.chmod(mode)  # the library makes files that nobody else may read


def split(tensors: Mapping[str, Tensor], max_size: int) -> list[dict[str, Tensor]]:
    """The tensors in order, in parts of at most ``max_size`` bytes, or of one tensor that is larger."""
    parts: list[dict[str, Tensor]] = [{}]
    room = max_size
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = max_size
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


def check_room(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ResourceError where ``folder`` lies on a disk that the tensors do not fit on."""
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{needed:,} bytes are needed and {free:,} are free in {folder.parent}; name a place on another disk"
        )


def _read_one(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        tensors = read_file(path)
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            raise CheckpointError(f"{path} holds more than named tensors; give the weights alone")
        return tensors
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise broken(path, error) from None


def _read_indexed(index: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in tqdm(shards_of(index), desc="reading", disable=None):
        tensors |= _read_one(shard)
    if missing := sorted(read_json(index)["weight_map"].keys() - tensors.keys()):
        raise CheckpointError(f"{index} names {missing[0]}, which no file holds (and {len(missing) - 1} more)")
    return tensors
