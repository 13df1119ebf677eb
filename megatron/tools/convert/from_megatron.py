"""GPT-2 models in the checkpoints of other Megatrons.

Their weights are first read under one set of names: word_embeddings.weight, position_embeddings.weight, layers.N. and
then those of our layers, final_layernorm.weight and .bias, and head.weight for an output projection of its own.

t tensor-parallel size, n heads of a rank, d size of a head
"""

import re
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.run_file import RUN_FILE
from megatron.common.errors import CheckpointError, ConfigError, first_line
from megatron.config import ModelConfig
from megatron.model.architectures import GPT2
from megatron.tools.convert.whole_model import WholeModel, in_order

_STUBBED = ("megatron.", "deepspeed.", "apex.", "numpy.")
"""Packages whose objects are in the files: enumerations, loss scalers, random states. None of them is needed."""


class _Stub:
    """Replaces an object of one of ``_STUBBED`` packages: accepts any arguments, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _read(path: Path) -> dict[str, Any]:
    """The content of ``path``. Raises CheckpointError unless it is tensors, plain values, arguments and stubs only."""
    try:
        # Names in files written before torch 1.6 cannot be listed, but torch refuses them while it loads.
        is_listed = zipfile.is_zipfile(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_listed else []
        stubs = [(_Stub, name) for name in names if name.startswith(_STUBBED)]
        if unknown := sorted(set(names) - {name for _, name in stubs} - {"argparse.Namespace"}):
            raise ValueError(f"it asks for {unknown[0]}, which could run code")
        with torch.serialization.safe_globals([Namespace, *stubs]):
            value = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, and should hold a dictionary")
    except Exception as error:  # torch raises many types for a damaged file
        raise CheckpointError(f"{path} cannot be read ({first_line(error)})") from error
    return value


State = dict[str, Tensor]

_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_WRAPPER = re.compile(r"(module\.)*(language_model\.)?(embedding\.|transformer\.|encoder\.)?")
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")
_HEAD = "head.weight"
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
    folder, version = _folder_with_files(path), 3.0
    layers: dict[int, dict[int, Path]] = {}
    for file in folder.glob("layer_*-model_states.pt"):
        if match := _LAYER_FILE.fullmatch(file.name):
            layers.setdefault(int(match[2]), {})[int(match[1])] = file
    files = [_read(file) for file in sorted(folder.glob("mp_rank_*_model_states.pt"))[: 1 if layers else None]]
    if layers:
        states = [_of_layers(folder, rank, numbered) for rank, numbered in sorted(layers.items())]
    elif files:  # DeepSpeed without a pipeline
        states = [_of_stages(folder, [file], "module") for file in files]
    else:
        stages = [[_read(file) for file in of_rank] for of_rank in _rank_files(folder)]
        states, files, version = [_of_stages(folder, of_rank, "model") for of_rank in stages], stages[0], 0.0
    args, saved = (files[0].get(key) if files else None for key in ("args", "checkpoint_version"))
    version = float(saved) if isinstance(saved, int | float) else version
    return Shards(folder, states, args if isinstance(args, Namespace) else Namespace(), version)


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
    """The folders that a tracker file may name."""
    for tracker in _TRACKERS:
        name = (path / tracker).read_text(errors="replace").strip() if (path / tracker).is_file() else ""
        if re.fullmatch(r"\w[\w.-]*", name):
            yield path / name
        if name.isdecimal() and len(name) < 19:
            yield path / f"iter_{int(name):07d}"
            yield path / f"global_step{int(name)}"


def _rank_files(folder: Path) -> list[list[Path]]:
    """The files of each tensor-parallel rank, in the order of the stages."""
    found: dict[int, dict[int, Path]] = {}
    for file in folder.glob("mp_rank_*/model_*rng.pt"):
        if match := _RANK_FOLDER.fullmatch(file.parent.name):
            found.setdefault(int(match[1]), {})[int(match[2] or 0)] = file
    if not found:
        raise CheckpointError(f"{folder}: no mp_rank_XX/model_optim_rng.pt there; only such files can be read")
    for rank, stages in found.items():
        _check_gapless([-1, *stages], f"{folder}/mp_rank_{rank:02d}_PPP")
    return [[stages[stage] for stage in sorted(stages)] for _, stages in sorted(found.items())]


def _of_stages(folder: Path, files: Sequence[Mapping[str, Any]], key: str) -> State:
    """Concatenate the weights of stages, each of which numbers its layers from 0."""
    state: State = {}
    first = 0
    for file in files:
        stage = file.get(key)
        if not isinstance(stage, Mapping):
            more = "; it was saved with virtual pipeline stages" if f"{key}0" in file else ""
            raise CheckpointError(f"{folder}: a file holds no weights under {key!r}{more}")
        last = first - 1
        for name, tensor in _named(stage).items():
            if match := _LAYER_NAME.fullmatch(name):
                number = first + int(match[1])
                name, last = f"layers.{number}.{match[2]}", max(number, last)
            state[name] = tensor
        first = last + 1
    return state


def _of_layers(folder: Path, rank: int, files: Mapping[int, Path]) -> State:
    """Read the files of layers in order. The kind of a layer follows from parameter names: numbers differ."""
    state: State = {}
    numbers: list[int] = []
    for number, file in sorted(files.items()):
        own, prefix = _named(_read(file)), ""
        if "input_layernorm.weight" in own:
            prefix = f"layers.{len(numbers)}."
            numbers.append(number)
        elif own.keys() == {"weight", "bias"}:
            prefix = "final_layernorm."
        elif "word_embeddings.weight" in own and "word_embeddings.weight" in state:
            own = {_HEAD: own["word_embeddings.weight"]}
        state |= {prefix + name: tensor for name, tensor in own.items()}
    _check_gapless(numbers, f"{folder}/layer_LL-model_{rank:02d}-model_states.pt")
    return state


def _check_gapless(numbers: Sequence[int], files: str) -> None:
    missing = set(range(min(numbers, default=0), max(numbers, default=0))) - set(numbers)
    if missing:
        raise CheckpointError(f"{files}: number {min(missing)} is missing between {min(numbers)} and {max(numbers)}")


def _named(tree: Mapping[str, Any], prefix: str = "") -> State:
    """The tensors of a tree under the names of this module; other values among them are no weights."""
    state: State = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            state |= _named(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not str(key).endswith("_extra_state"):
            name = _WRAPPER.sub("", f"{prefix}{key}", count=1).replace("self_attention.", "attention.")
            name = re.sub(r"(input|post_attention|final)_norm\.", r"\1_layernorm.", name)
            state[_HEAD if name in _HEADS else name] = value
    return state


_OTHER_MODELS = ("swiglu", "geglu", "squared_relu")
"""Arguments that make another model of tensors with the same names."""
_SAME = ("apply_residual_connection_post_layernorm", "attention_dropout", "hidden_dropout", "init_method_std")
"""Arguments that mean here what they mean there."""


@dataclass(frozen=True)
class GivenModel:
    """Properties of the model given by the user; None means those in the files."""

    heads: int | None = None
    vocab_size: int | None = None
    eod_token: int | None = None
    version: float | None = None
    openai_gelu: bool = False
    layernorm_epsilon: float | None = None


def whole_model(shards: Shards, given: GivenModel) -> WholeModel:
    """The model in fp32.

    Raises ConfigError if a property is neither in the files nor given, CheckpointError if weights are missing, have
    other shapes, or belong to another model than GPT-2.
    """
    args = {name: value for name, value in vars(shards.args).items() if isinstance(value, int | float)}
    if wrong := [name for name in _OTHER_MODELS if args.get(name)]:
        raise CheckpointError(f"{shards.folder} was trained with {wrong[0]}, so it is not a GPT-2")
    config = _config(shards, args, given)
    names = _our_names(config)
    words = names[_HEAD] = names["word_embeddings.weight"]
    specs = GPT2.named_parameters(config)
    version = shards.version if given.version is None else given.version
    ordered = [_with_order(state, version, config, len(shards.states)) for state in shards.states]
    weights: State = {}
    for name in sorted(ordered[0], key=_HEAD.__eq__):
        ours = names.get(name, name)
        dim = specs[ours].shard_dim if ours in specs else None
        parts = [_tensor(state, name, shards) for state in ordered]
        try:
            weight = (parts[0] if dim is None else torch.cat(parts, dim)).float()
        except (RuntimeError, IndexError):
            message = f"{shards.folder}: {name}: the shapes of the ranks' shards do not match"
            raise CheckpointError(message) from None
        if name == _HEAD and not weight.equal(weights[words]):
            raise CheckpointError(f"{shards.folder}: the output projection is not the embedding table, as it is here")
        weights[ours] = weight
    weights[words] = weights[words][: config.vocab_size]
    return WholeModel(config, in_order(weights, config, str(shards.folder)))


def _config(shards: Shards, args: Mapping[str, Any], given: GivenModel) -> ModelConfig:
    first, size = shards.states[0], len(shards.states)
    rows, hidden = _tensor(first, "word_embeddings.weight", shards, dims=2).shape
    sizes = {name: value for name, value in args.items() if type(value) is int and value > 0}
    heads = given.heads or sizes.get("num_attention_heads")
    vocab_size = given.vocab_size or sizes.get("vocab_size")
    layers = len({name.split(".")[1] for name in first if name.startswith("layers.")})
    problems = []
    if not heads:
        problems.append(f"{shards.folder} does not contain the number of heads: give --num-attention-heads")
    elif heads < 0 or hidden % heads or heads % size:
        problems.append(
            f"{heads} heads do not divide hidden size {hidden} over {size} ranks: give the right --num-attention-heads"
        )
    if not vocab_size:
        problems.append(
            f"{shards.folder} has {rows * size} rows of tokens, including padding: give --vocab-file or --vocab-size"
        )
    elif not 0 < vocab_size <= rows * size:
        problems.append(f"the vocabulary has {vocab_size} tokens, but {shards.folder} only {rows * size} rows")
    if problems or not (heads and vocab_size):
        raise ConfigError(problems)
    if layers != args.get("num_layers", layers):
        raise CheckpointError(f"{shards.folder} holds {layers} of {args['num_layers']} layers; some files are missing")
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=len(_tensor(first, "layers.0.mlp.dense_h_to_4h.bias", shards, dims=1)) * size,
        max_position_embeddings=len(_tensor(first, "position_embeddings.weight", shards, dims=2)),
        # Fused with the bias, Megatron's GELU is the tanh approximation; not fused, it is exact.
        openai_gelu=given.openai_gelu or bool(args.get("openai_gelu") or args.get("bias_gelu_fusion")),
        layernorm_epsilon=given.layernorm_epsilon or args.get("layernorm_epsilon") or 1e-5,
        **{name: args[name] for name in _SAME if name in args},
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        eod_token=vocab_size - 1 if given.eod_token is None else given.eod_token,
    )


def _our_names(config: ModelConfig) -> dict[str, str]:
    """The names of this module -> ours."""
    names: dict[str, str] = {}
    outer = {"WordEmbedding": "", "PositionEmbedding": "", "LayerNorm": "final_layernorm."}
    blocks = 0
    for prefix, layer in GPT2.prefixed_layers(config):
        theirs = f"layers.{blocks}." if layer.is_block else outer.get(layer.class_name)
        blocks += layer.is_block
        if theirs is not None:
            names |= {theirs + spec.name: prefix + spec.name for spec in layer.parameters}
    return names


def _with_order(state: State, version: float, config: ModelConfig, size: int) -> State:
    """A rank's weights with the rows of query_key_value as [n, 3, d]."""
    heads = config.num_attention_heads // size
    shape, dims = {0.0: ((3, heads, -1), (0, 1)), 1.0: ((heads, -1, 3), (1, 2))}.get(version, ((), ()))
    ordered = dict(state)
    for name, tensor in state.items():
        if dims and "query_key_value" in name and tensor.dim() and len(tensor) % (3 * heads) == 0:
            ordered[name] = tensor.unflatten(0, shape).transpose(*dims).flatten(0, 2)
    return ordered


def _tensor(state: State, name: str, shards: Shards, *, dims: int | None = None) -> Tensor:
    if name not in state:
        raise CheckpointError(f"{shards.folder} holds no {name}")
    tensor = state[name]
    if dims not in (None, tensor.dim()):
        raise CheckpointError(f"{shards.folder}: {name} is {list(tensor.shape)}, and should have {dims} dimensions")
    return tensor
