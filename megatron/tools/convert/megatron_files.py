"""The checkpoints of other Megatrons, read under one set of parameter names.

The names are word_embeddings.weight, position_embeddings.weight, layers.N. and then those of our layers,
final_layernorm.weight and .bias, and head.weight for an output projection of its own.
"""

import re
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.run_file import RUN_FILE
from megatron.common.errors import CheckpointError, first_line

_STUBBED = ("megatron.", "deepspeed.", "apex.", "numpy.")
"""Packages whose objects are in the files: enumerations, loss scalers, random states. None of them is needed."""


class Stub:
    """Replaces an object of one of ``_STUBBED`` packages: accepts any arguments, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Stub":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_foreign(path: Path) -> dict[str, Any]:
    """The content of ``path``, on the CPU, with a ``Stub`` for each object of another program.

    Raises CheckpointError if it is missing or damaged, or asks for anything else than tensors, plain values,
    arguments and stubs.
    """
    try:
        names = _globals(path)
        stubs = [(Stub, name) for name in names if name.startswith(_STUBBED)]
        with torch.serialization.safe_globals([Namespace, *stubs]):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file
        raise CheckpointError(f"{path} cannot be read ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, and should hold a dictionary")
    return value


def _globals(path: Path) -> list[str]:
    """The classes that the file asks for besides those that are always safe. Raises ValueError if one is unknown."""
    if not zipfile.is_zipfile(path):
        return []  # written before torch 1.6: they cannot be listed, but torch refuses them while it loads
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    unknown = sorted(name for name in names if name != "argparse.Namespace" and not name.startswith(_STUBBED))
    if unknown:
        raise ValueError(f"it asks for {unknown[0]}, which could run code")
    return names


State = dict[str, Tensor]

_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_WRAPPER = re.compile(r"(module\.)*(language_model\.)?(embedding\.|transformer\.|encoder\.)?")
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")
HEAD = "head.weight"
_HEADS = ("word_embeddings_for_head.weight", "output_layer.weight", "lm_head.weight")


@dataclass(frozen=True)
class Shards:
    """The weights of each tensor-parallel rank, from all pipeline stages."""

    folder: Path
    states: list[State]
    """One for each tensor-parallel rank."""
    args: Namespace
    """The arguments of the run, as far as they were saved."""
    version: float
    """The checkpoint version, which decides the order of query_key_value; the format's default if none was saved."""


def read_shards(path: Path) -> Shards:
    """All weights under ``path``, a folder of checkpoints or one of them.

    Raises CheckpointError if there is no known format, or a file is missing or damaged, or could run code.
    """
    folder = _folder_with_files(path)
    layers = [match for file in folder.glob("layer_*-model_states.pt") if (match := _LAYER_FILE.fullmatch(file.name))]
    ranks = sorted(file for file in folder.glob("mp_rank_*_model_states.pt") if _RANK_FILE.fullmatch(file.name))
    if layers:
        states = [_of_layers(folder, rank) for rank in sorted({match[2] for match in layers})]
        return _shards(folder, states, read_foreign(ranks[0]) if ranks else {}, version=3.0)
    if ranks:  # DeepSpeed without a pipeline
        files = [read_foreign(file) for file in ranks]
        return _shards(folder, [_of_stages(folder, [_part(folder, file, "module")]) for file in files], files[0], 3.0)
    folders = _rank_folders(folder)
    of_ranks = [[read_foreign(file) for file in stages] for stages in folders.values()]
    states = [_of_stages(folder, [_part(folder, file, "model") for file in stages]) for stages in of_ranks]
    return _shards(folder, states, of_ranks[0][0], version=0.0)


def _shards(folder: Path, states: list[State], file: Mapping[str, Any], version: float) -> Shards:
    args, saved_version = file.get("args"), file.get("checkpoint_version")
    return Shards(
        folder,
        states,
        args=args if isinstance(args, Namespace) else Namespace(),
        version=float(saved_version) if isinstance(saved_version, int | float) else version,
    )


def _folder_with_files(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if any(path.glob(RUN_FILE)) or any(path.glob(f"*/{RUN_FILE}")):
        raise CheckpointError(f"{path} is a checkpoint of this suite: --load it as it is")
    for folder in (path, *_tracked(path)):
        if any(folder.glob("mp_rank_*")) or any(folder.glob("layer_*-model_*-model_states.pt")):
            return folder
    raise CheckpointError(
        f"{path}: no checkpoint of Megatron there, neither mp_rank_* nor layer_* files, nor a tracker that names one"
    )


def _tracked(path: Path) -> Iterator[Path]:
    for tracker in _TRACKERS:
        try:
            name = (path / tracker).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if re.fullmatch(r"\w[\w.-]*", name):
            yield path / name
        if name.isdecimal() and len(name) < 19:
            yield path / f"iter_{int(name):07d}"
            yield path / f"global_step{int(name)}"


def _rank_folders(folder: Path) -> dict[int, list[Path]]:
    """The files of each tensor-parallel rank, in the order of the stages."""
    found: dict[int, dict[int, Path]] = {}
    for file in folder.glob("mp_rank_*/model_*rng.pt"):
        if match := _RANK_FOLDER.fullmatch(file.parent.name):
            found.setdefault(int(match[1]), {})[int(match[2] or 0)] = file
    if not found:
        raise CheckpointError(f"{folder}: no mp_rank_XX/model_optim_rng.pt there; only such files can be read")
    for rank, stages in found.items():
        _check_gapless([-1, *stages], f"{folder}/mp_rank_{rank:02d}_PPP")
    return {rank: [stages[stage] for stage in sorted(stages)] for rank, stages in sorted(found.items())}


def _part(folder: Path, file: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = file.get(key)
    if not isinstance(part, Mapping):
        more = "; it was saved with virtual pipeline stages" if f"{key}0" in file else ""
        raise CheckpointError(f"{folder}: a file holds no weights under {key!r}{more}")
    return part


def _of_stages(folder: Path, stages: Iterable[Mapping[str, Any]]) -> State:
    """Concatenate stages, each of which numbers its layers from 0."""
    state: State = {}
    first = 0
    for stage in stages:
        weights = {_plain_name(name): tensor for name, tensor in _flat(stage)}
        last = first - 1
        for name, tensor in weights.items():
            if match := _LAYER_NAME.fullmatch(name):
                number = first + int(match[1])
                name, last = f"layers.{number}.{match[2]}", max(number, last)
            state[name] = tensor
        first = last + 1
    return state


def _of_layers(folder: Path, rank: str) -> State:
    """Read the files of layers in order. The kind of a layer follows from parameter names: numbers differ."""
    state: State = {}
    numbers: list[int] = []
    for number, file in sorted(_layer_files(folder, rank)):
        own = {_plain_name(name): tensor for name, tensor in _flat(read_foreign(file))}
        if "input_layernorm.weight" in own:
            prefix = f"layers.{len(numbers)}."
            numbers.append(number)
        elif own.keys() == {"weight", "bias"}:
            prefix = "final_layernorm."
        elif "word_embeddings.weight" in own and "word_embeddings.weight" in state:
            own, prefix = {HEAD: own["word_embeddings.weight"]}, ""
        else:
            prefix = ""
        state |= {prefix + name: tensor for name, tensor in own.items()}
    _check_gapless(numbers, f"{folder}/layer_LL-model_{rank}-model_states.pt")
    return state


def _layer_files(folder: Path, rank: str) -> Iterator[tuple[int, Path]]:
    for file in folder.glob(f"layer_*-model_{rank}-model_states.pt"):
        if match := _LAYER_FILE.fullmatch(file.name):
            yield int(match[1]), file


def _check_gapless(numbers: Sequence[int], files: str) -> None:
    missing = set(range(min(numbers, default=0), max(numbers, default=0))) - set(numbers)
    if missing:
        raise CheckpointError(f"{files}: number {min(missing)} is missing between {min(numbers)} and {max(numbers)}")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors with their paths; other values among them are no weights."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor) and not str(name).endswith("_extra_state"):
            yield f"{prefix}{name}", value


def _plain_name(name: str) -> str:
    name = _WRAPPER.sub("", name, count=1).replace("self_attention.", "attention.")
    name = re.sub(r"(input|post_attention|final)_norm\.", r"\1_layernorm.", name)
    return HEAD if name in _HEADS else name
