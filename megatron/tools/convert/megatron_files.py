"""Reads weights in checkpoints of other Megatrons, with common names for all formats.

The names are word_embeddings.weight, position_embeddings.weight, layers.N.NAME with NAME as in our layers,
final_layernorm.weight and .bias, and for the output projection head.weight, or head_copy.weight if it is tied.
"""

import math
import re
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checks import outline, wrong
from megatron.checkpoint.run_file import RUN_FILE
from megatron.checkpoint.tensor_files import load_plain, no_floats, unreadable
from megatron.common.errors import CheckpointError, shown
from megatron.common.reading import check_archive, is_present
from megatron.tools.convert.one_run import check_one_run, check_sizes
from megatron.tools.convert.torch_dist import METADATA, read_torch_dist

_STUBBED = ("megatron.", "deepspeed.", "apex.", "numpy.", "builtins.getattr")
"""Packages whose objects in the files (enumerations, loss scalers, random states) are not needed.

Python 3.11.0 to 3.11.3 write the member of an enumeration as a call of getattr.
"""


class _Stub:
    """Replaces objects of the packages ``_STUBBED``: accepts any arguments, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _read(path: Path) -> dict[str, Any]:
    """Read a pickled file. Raises CheckpointError if it has other content than tensors, plain values and arguments."""
    try:
        check_archive(path)
        # Files written before torch 1.6 do not list their globals; torch rejects unsafe ones when it loads.
        is_listed = zipfile.is_zipfile(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_listed else []
        stubs = [(_Stub, name) for name in names if name.startswith(_STUBBED)]
        if unknown := sorted(set(names) - {name for _, name in stubs} - {"argparse.Namespace"}):
            raise ValueError(f"it asks for {unknown[0]}, which could run code")
        value = load_plain(path, [Namespace, *stubs], map_location="cpu")
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, and should hold a dictionary")
    except Exception as error:  # torch raises many types for a damaged file
        raise unreadable(path, error) from error
    return value


State = dict[str, Tensor]

_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
_LONGEST_NAME = 255
"""Bytes of the name of a file."""
_LAYER_FILES = "layer_*-model_*-model_states.pt"
_MODULE_FILES = "mp_rank_*_model_states.pt"
_STAGE_FILES = "mp_rank_*/model_*rng.pt"
_NUMBERS = {
    _LAYER_FILES: re.compile(r"layer_(?P<part>[0-9]+)-model_(?P<rank>[0-9]+)-model_states\.pt"),
    _MODULE_FILES: re.compile(r"mp_rank_(?P<rank>[0-9]+)(?P<part>)_model_states\.pt"),
    _STAGE_FILES: re.compile(r"mp_rank_(?P<rank>[0-9]+)(?:_(?P<part>[0-9]+))?/model_.*rng\.pt"),
}
"""The files of each kind: the tensor-parallel rank, and the layer or the pipeline stage."""
_WRAPPER = re.compile(r"(module\.)*(language_model\.)?(embedding\.|transformer\.|encoder\.|decoder\.)?")
_LAYER_NAME = re.compile(r"layers\.([0-9]{1,9})\.(.+)")
_STACKED_NAME = re.compile(r"layers\.([a-z].*)")
HEAD = "head.weight"
HEAD_COPY = "head_copy.weight"
_HEADS = {
    "word_embeddings_for_head.weight": HEAD_COPY,
    "output_layer.weight": HEAD,
    "lm_head.weight": HEAD,
}
_OUR_MODULES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "self_attention.linear_qkv.": "attention.query_key_value.",
    "self_attention.linear_proj.": "attention.dense.",
    "self_attention.": "attention.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "input_norm.": "input_layernorm.",
    "post_attention_norm.": "post_attention_layernorm.",
    "final_norm.": "final_layernorm.",
}
"""Modules of megatron-core and later Megatron-LM -> ours; the first one found in a name is replaced."""
_NO_WEIGHT = ("_extra_state", "inv_freq")
"""Name suffixes of tensors that are not weights: states of the FP8 library, and frequencies of RoPE."""


@dataclass(frozen=True)
class Shards:
    """The weights of each tensor-parallel rank, from all pipeline stages."""

    folder: Path
    states: list[State]
    """Weights of each tensor-parallel rank."""
    args: Namespace
    """The saved arguments of the run; empty if none were saved."""
    version: float
    """The checkpoint version, which determines the row order of query_key_value; by default as of the format."""


def read_shards(path: Path) -> Shards:
    """Read all weights of the checkpoint at ``path``, or of the newest one in the folder ``path``.

    Raises CheckpointError if there is no known format, or a file is missing or damaged, or could run code.
    """
    folder, version = _folder_with_files(path), 3.0
    if is_present(folder / METADATA):
        return _read_torch_dist(folder)
    layers, modules = _files_of_ranks(folder, _LAYER_FILES), _files_of_ranks(folder, _MODULE_FILES)
    if layers:
        file = next((_read(file) for numbered in modules for file in numbered.values()), {})
        check_sizes(folder, file, len(layers))
        states = [_read_layer_files(folder, rank, numbered) for rank, numbered in enumerate(layers)]
        return _with_args(folder, states, file, version)
    key, version = ("module", 3.0) if modules else ("model", 0.0)  # DeepSpeed without a pipeline, or Megatron-LM
    paths = [list(numbered.values()) for numbered in modules] or _rank_files(folder)
    ranks = [[(file, _read(file)) for file in stages] for stages in paths]
    check_one_run(folder, ranks)
    states = [_concatenate_stages(folder, [content for _, content in stages], key) for stages in ranks]
    return _with_args(folder, states, ranks[0][0][1], version)


def _with_args(folder: Path, states: list[State], file: Mapping[str, Any], version: float) -> Shards:
    args, saved = file.get("args"), file.get("checkpoint_version")
    if saved is not None and type(saved) not in (int, float):
        found = outline(saved) if isinstance(saved, Tensor) else shown(saved)
        raise wrong(folder, "checkpoint_version", found, "a number")
    for rank, state in enumerate(states):
        for name in sorted(state.keys() ^ states[0].keys()):
            raise CheckpointError(f"{folder}: of the tensor-parallel ranks 0 and {rank} only one holds {name}")
    if saved is not None:
        version = math.inf if abs(saved) > sys.float_info.max else float(saved)
    return Shards(folder, states, args if isinstance(args, Namespace) else Namespace(), version)


def _read_torch_dist(folder: Path) -> Shards:
    """Read the torch_dist format: full weights, stacked over layers as [l, ..]; arguments are in common.pt."""
    state: State = {}
    for name, tensor in _named(folder, read_torch_dist(folder)).items():
        if match := _STACKED_NAME.fullmatch(name):
            layers = tensor.unbind() if tensor.dim() else ()
            state |= {f"layers.{number}.{match[1]}": layer for number, layer in enumerate(layers)}
        else:
            state[name] = tensor
    common = folder / "common.pt"
    return _with_args(folder, [state], _read(common) if is_present(common) else {}, 3.0)


def _folder_with_files(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if any(path.glob(RUN_FILE)) or any(path.glob(f"*/{RUN_FILE}")):
        raise CheckpointError(f"{path} is a checkpoint of this suite: --load it directly")
    for folder in (path, *_tracked(path)):
        if is_present(folder / METADATA) or any(folder.glob("mp_rank_*")) or any(folder.glob(_LAYER_FILES)):
            return folder
    raise CheckpointError(
        f"{path}: no checkpoint of Megatron there: neither {METADATA} (torch_dist), nor mp_rank_* or layer_* files, "
        "nor a tracker that names one"
    )


def _tracked(path: Path) -> Iterator[Path]:
    """Folders that the tracker files in ``path`` may name."""
    for tracker in _TRACKERS:
        is_short = (path / tracker).is_file() and (path / tracker).stat().st_size <= _LONGEST_NAME
        name = (path / tracker).read_text(errors="replace").strip() if is_short else ""
        if re.fullmatch(r"\w[\w.-]*", name):
            yield path / name
        if re.fullmatch("[0-9]{1,18}", name):
            yield path / f"iter_{int(name):07d}"
            yield path / f"global_step{int(name)}"


def _rank_files(folder: Path) -> list[list[Path]]:
    """For each tensor-parallel rank its files, in the order of pipeline stages."""
    if not (files := _files_of_ranks(folder, _STAGE_FILES)):
        raise CheckpointError(f"{folder}: no mp_rank_XX/model_optim_rng.pt there; only such files can be read")
    for rank, stages in enumerate(files):
        _check_gapless([-1, *stages], f"{folder}/mp_rank_{rank:02d}_PPP")
    return [list(stages.values()) for stages in files]


def _files_of_ranks(folder: Path, kind: str) -> list[dict[int, Path]]:
    """For each tensor-parallel rank its files of a ``kind`` in ``_NUMBERS``, in the order of layers or stages."""
    files: dict[int, dict[int, Path]] = {}
    for file in folder.glob(kind):
        if match := _NUMBERS[kind].fullmatch(file.relative_to(folder).as_posix()):
            other = files.setdefault(int(match["rank"]), {}).setdefault(int(match["part"] or 0), file)
            if other is not file:
                raise CheckpointError(f"{file} and {other} are of the same rank: remove one of them")
    _check_gapless([-1, *files], f"{folder}/{kind}")
    return [dict(sorted(numbered.items())) for _, numbered in sorted(files.items())]


def _concatenate_stages(folder: Path, files: Sequence[Mapping[str, Any]], key: str) -> State:
    """Join the weights of pipeline stages, each of which numbers its layers from 0."""
    state: State = {}
    first = 0
    for file in files:
        stage = file.get(key)
        if not isinstance(stage, Mapping):
            more = "; it was saved with virtual pipeline stages" if f"{key}0" in file else ""
            raise CheckpointError(f"{folder}: a file holds no weights under {key!r}{more}")
        last = first - 1
        for name, tensor in _named(folder, stage).items():
            if match := _LAYER_NAME.fullmatch(name):
                number = first + int(match[1])
                name, last = f"layers.{number}.{match[2]}", max(number, last)
            state[name] = tensor
        first = last + 1
    return state


def _read_layer_files(folder: Path, rank: int, files: Mapping[int, Path]) -> State:
    """Read layer files in order. Parameter names tell the kind of a layer, since numbers vary between versions."""
    state: State = {}
    numbers: list[int] = []
    for number, file in files.items():
        layer, prefix = _named(file, _read(file)), ""
        if "input_layernorm.weight" in layer:
            prefix = f"layers.{len(numbers)}."
            numbers.append(number)
        elif "weight" in layer and layer["weight"].dim() == 1:
            prefix = "final_layernorm."
        elif "word_embeddings.weight" in layer and "word_embeddings.weight" in state:
            layer = {HEAD_COPY: layer["word_embeddings.weight"]}
        state |= {prefix + name: tensor for name, tensor in layer.items()}
    _check_gapless(numbers, f"{folder}/layer_LL-model_{rank:02d}-model_states.pt")
    return state


def _check_gapless(numbers: Sequence[int], files: str) -> None:
    for number, following in pairwise(sorted(numbers)):
        if following > number + 1:
            raise CheckpointError(f"{files}: number {number + 1} is missing before {following}")


def _named(place: Path, tree: Mapping[str, Any]) -> State:
    """The tensors in nested dictionaries at ``place``, with the names of this module; other values are dropped."""
    state: State = {}
    for key, value in _tensors(tree):
        name = _WRAPPER.sub("", key, count=1)
        if theirs := next((module for module in _OUR_MODULES if module in name), None):
            name = name.replace(theirs, _OUR_MODULES[theirs], 1)
        name = _HEADS.get(name, name)
        if state.setdefault(name, value) is not value:
            raise CheckpointError(f"{place}: {key} is another tensor that is {name}: a GPT has one of each")
    return state


def _tensors(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dictionaries with the path of their keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not str(key).endswith(_NO_WEIGHT):
            yield f"{prefix}{key}", value


def tensor_of(shards: Shards, name: str, *, rank: int = 0) -> Tensor:
    """The tensor ``name`` of a rank. Raises CheckpointError if it is missing or not of floats."""
    if name not in shards.states[rank]:
        raise CheckpointError(f"{shards.folder} holds no {name}")
    if problems := no_floats(shards.states[rank], [name], str(shards.folder)):
        raise CheckpointError(problems)
    return shards.states[rank][name]
