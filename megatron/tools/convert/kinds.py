"""What a path holds, found without torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from megatron.checkpoint.saved_run import RUN_FILE, SavedRun
from megatron.checkpoint.tracker import LATEST, TRACKER, newest, tag_at
from megatron.config.errors import CheckpointError

HF_CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True)
class Found:
    """A path, and which of ``KINDS`` it is."""

    path: Path
    kind: str
    saved: SavedRun | None = None
    """The checkpoint that it is, or that it points to, where it is one of this suite."""

    @property
    def what(self) -> str:
        """The kind in words."""
        return KINDS[self.kind].words

    @property
    def description(self) -> dict[str, Any] | None:
        """What ``run.json`` says, if there is one; merged weights keep it in their own file."""
        return self.saved.description if self.saved else None


@dataclass(frozen=True)
class Kind:
    """How to know a kind of path, and what it is called."""

    words: str
    matches: Callable[[Path], bool]
    saved: Callable[[Path], SavedRun | None] = lambda path: None


def _is_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors" and path.is_file() or _has(SAFETENSORS, SAFETENSORS + INDEX_SUFFIX)(path)


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: any((path / name).exists() for name in names)


def _is_folder(path: Path) -> bool:
    return _has(LATEST, TRACKER)(path) or path.is_dir() and any(path.glob(f"*/{RUN_FILE}"))


def _source(path: Path) -> SavedRun | None:
    """The tag that a universal checkpoint lies beside, which says what both are."""
    tag = path.with_name(path.name.removesuffix("_universal"))
    return next((tag_at(place) for place in (path, tag) if (place / RUN_FILE).exists()), None)


KINDS = {
    "universal": Kind("a universal checkpoint", _has("zero"), _source),
    "tag": Kind("one checkpoint", _has(RUN_FILE), tag_at),
    "folder": Kind("a folder of checkpoints", _is_folder, newest),
    "huggingface": Kind("a Hugging Face folder", _has(HF_CONFIG)),
    "safetensors": Kind("weights in one piece (safetensors)", _is_safetensors),
}
"""In the order in which they are tried."""


def find(path: Path) -> Found:
    """What ``path`` is.

    Raises CheckpointError where it is nothing that is known, or a checkpoint of this suite that is not whole.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; name a checkpoint")
    path = path.resolve() if path.name in ("", "..") else path  # a tag is told by its name
    for name, kind in KINDS.items():
        if kind.matches(path):
            return Found(path, name, kind.saved(path))
    if path.is_dir() and any(path.glob("*_model_states.pt")):
        tag_at(path)  # says what is missing
    raise CheckpointError(
        f"{path} is no checkpoint: it has neither {LATEST} nor {RUN_FILE}, {HF_CONFIG}, {SAFETENSORS} or zero/"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises CheckpointError where it holds none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # JSON's and UTF-8's, and brackets in brackets without end
        raise CheckpointError(f"{path} is not JSON ({error}); is it whole?") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is a JSON {type(tree).__name__}, and should be an object")
    return tree


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
