"""The model that a path holds, of whatever kind it is."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.exchange.description import RUN_KEY, read_config, read_description
from megatron.checkpoint.exchange.huggingface import read_huggingface
from megatron.checkpoint.exchange.kinds import Found
from megatron.checkpoint.exchange.outline import outline
from megatron.checkpoint.exchange.tensor_files import read_tensors
from megatron.checkpoint.exchange.whole import WholeModel, check_sizes, in_order
from megatron.checkpoint.files import read_file
from megatron.checkpoint.universal import VOCABULARY
from megatron.checkpoint.weights import whole_weights
from megatron.checkpoint.whole_config import whole_model_config
from megatron.errors import CheckpointError


def read_model(found: Found) -> WholeModel:
    """All of its weights in one piece. Raises CheckpointError where it is not whole."""
    return _READERS[found.kind](found)


def read_weights(found: Found) -> Mapping[str, Tensor]:
    """All weights by name, also where nothing says what model they are of. Raises as ``read_model`` does."""
    if found.kind == "universal" and found.saved is None:
        return _universal_weights(found.path)
    return read_model(found).weights


def read_versions(found: Found) -> dict[str, Any] | None:
    """Which DeepSpeed wrote it, and Megatron's number for what the names and rows mean."""
    if found.kind not in ("tag", "folder"):
        return None
    file = next((found.saved.folder / found.saved.tag).glob("*mp_rank_00_model_states.pt"), None)
    if file is None:
        raise CheckpointError(
            f"{found.saved.folder / found.saved.tag} has no mp_rank_00_model_states.pt; it is not whole"
        )
    state = read_file(file)
    return {"DeepSpeed": state.get("ds_version"), "checkpoint": state.get("checkpoint_version")}


def run_metadata(model: WholeModel) -> dict[str, str]:
    """What the header of merged weights says, for ``read_model`` to know the model by."""
    return {RUN_KEY: json.dumps(model.description)}


def _of_suite(found: Found) -> WholeModel:
    saved = found.saved
    config = whole_model_config(saved)
    weights = {name: copies[0] for name, copies in whole_weights(outline(config), saved)}
    return WholeModel(config, weights, saved.description)


def _of_universal(found: Found) -> WholeModel:
    if found.saved is None:
        raise CheckpointError(f"{found.path} does not say what model it is, nor does a tag beside it: name that tag")
    config = whole_model_config(found.saved)
    weights = _universal_weights(found.path)
    for name in weights:
        if re.fullmatch(VOCABULARY, name):
            weights[name] = weights[name][: config.vocab_size]  # the rest is padding
    return WholeModel(config, in_order(weights, config, str(found.path)), found.saved.description)


def _universal_weights(path: Path) -> dict[str, Tensor]:
    """``zero/NAME/fp32.pt`` for each weight, in the order of the layers as far as their names tell."""
    files = {file.parent.name: file for file in (path / "zero").glob("*/fp32.pt")}
    number = {name: int(layer) if (layer := name.split(".")[0]).isdecimal() else -1 for name in files}
    return {name: _fp32(files[name]) for name in sorted(files, key=lambda name: (number[name], name))}


def _fp32(file: Path) -> Tensor:
    value = read_file(file)
    return value["param"] if isinstance(value, Mapping) else value


def _of_safetensors(found: Found) -> WholeModel:
    config, weights = read_config(found), read_tensors(found.path)
    check_sizes(config, len(weights), str(found.path))
    return WholeModel(config, in_order(weights, config, str(found.path)), read_description(found))


def _of_huggingface(found: Found) -> WholeModel:
    return read_huggingface(found.path)


_READERS: dict[str, Callable[[Found], WholeModel]] = {
    "tag": _of_suite,
    "folder": _of_suite,
    "universal": _of_universal,
    "safetensors": _of_safetensors,
    "huggingface": _of_huggingface,
}
