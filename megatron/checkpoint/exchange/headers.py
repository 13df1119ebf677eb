"""What safetensors files say of themselves beside their tensors. No torch here."""

from pathlib import Path

import safetensors

from megatron.checkpoint.exchange.kinds import INDEX_SUFFIX, SAFETENSORS, read_json
from megatron.errors import CheckpointError


def read_metadata(path: Path) -> dict[str, str]:
    """What the header of a safetensors file, or of the first of several, says beside the tensors."""
    if path.is_dir():
        whole = path / SAFETENSORS
        path = whole if whole.exists() else shards_of(path / (SAFETENSORS + INDEX_SUFFIX))[0]
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise broken(path, error) from None


def shards_of(index: Path) -> list[Path]:
    """The files of an index, all of them in its own folder."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map, which says what is in which file")
    files = []
    for name in dict.fromkeys(map(str, names.values())):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names the file {name!r}, which is not beside it")
        files.append(index.parent / name)
    return files


def broken(path: Path, error: Exception) -> CheckpointError:
    """What to raise where the library refuses ``path``."""
    return CheckpointError(f"{path} is no whole safetensors file ({str(error).splitlines()[0]}); copy it once more")
