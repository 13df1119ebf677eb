"""The model that a path holds, of whatever kind it is."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.exchange.huggingface import read_huggingface
from megatron.checkpoint.exchange.kinds import Found
from megatron.checkpoint.exchange.outline import WORDS, outline
from megatron.checkpoint.exchange.tensor_files import read_metadata, read_tensors
from megatron.checkpoint.exchange.whole import WholeModel, in_order
from megatron.checkpoint.files import read_file
from megatron.checkpoint.tracker import SavedRun
from megatron.checkpoint.weights import whole_model_config, whole_weights
from megatron.errors import CheckpointError

RUN_KEY = "run"
"""Where the header of merged weights keeps ``run.json``."""


def read_model(found: Found) -> WholeModel:
    """All of its weights in one piece. Raises CheckpointError where it is not whole."""
    return _READERS[found.kind](found)


def run_metadata(model: WholeModel) -> dict[str, str]:
    """What the header of merged weights says, for ``read_model`` to know the model by."""
    return {RUN_KEY: json.dumps(model.description)}


def _of_suite(found: Found) -> WholeModel:
    saved = found.saved
    config = whole_model_config(saved)
    weights = {name: copies[0] for name, copies in whole_weights(outline(config), saved)}
    return WholeModel(config, weights, saved.description)


def _of_universal(found: Found) -> WholeModel:
    """What DeepSpeed calls universal: ``zero/NAME/fp32.pt`` for each weight."""
    if found.saved is None:
        raise CheckpointError(
            f"{found.path} has no run.json, which says what model it is; name the tag it was made from"
        )
    config = whole_model_config(found.saved)
    weights = {file.parent.name: _fp32(file) for file in sorted((found.path / "zero").glob("*/fp32.pt"))}
    if WORDS in weights:
        weights[WORDS] = weights[WORDS][: config.vocab_size]  # the rest is padding
    return WholeModel(config, in_order(weights, config, str(found.path)), found.saved.description)


def _fp32(file: Path) -> Tensor:
    value = read_file(file)
    return value["param"] if isinstance(value, Mapping) else value


def _of_safetensors(found: Found) -> WholeModel:
    description = _kept_description(found.path)
    saved = SavedRun(found.path.parent, found.path.name, description)
    config = whole_model_config(saved)
    return WholeModel(config, in_order(read_tensors(found.path), config, str(found.path)), description)


def _kept_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(read_metadata(path)[RUN_KEY])
        description["config"]["model"].keys()
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path} does not say what model it is; merge writes files that do, from-hf reads a folder with config.json"
        ) from None
    return description


def _of_huggingface(found: Found) -> WholeModel:
    return read_huggingface(found.path)


_READERS: dict[str, Callable[[Found], WholeModel]] = {
    "tag": _of_suite,
    "folder": _of_suite,
    "universal": _of_universal,
    "safetensors": _of_safetensors,
    "huggingface": _of_huggingface,
}
