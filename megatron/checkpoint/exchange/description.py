"""What a path says of the model that it holds, and of where it comes from. No torch here."""

import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.exchange.headers import read_metadata
from megatron.checkpoint.exchange.huggingface_config import from_huggingface
from megatron.checkpoint.exchange.kinds import HF_CONFIG, Found, read_json
from megatron.checkpoint.tracker import SavedRun
from megatron.checkpoint.whole_config import whole_model_config
from megatron.config import ModelConfig
from megatron.errors import CheckpointError

RUN_KEY = "run"
"""Where the header of merged weights keeps ``run.json``."""


def read_config(found: Found, *, vocab_size: int | None = None) -> ModelConfig | None:
    """What model it is, if anything says so. ``vocab_size`` is that of a Hugging Face folder's tokenizer, if known."""
    if found.kind == "huggingface":
        return from_huggingface(read_json(found.path / HF_CONFIG), found.path / HF_CONFIG, vocab_size=vocab_size)
    description = read_description(found)
    return (
        None if description is None else whole_model_config(SavedRun(found.path.parent, found.path.name, description))
    )


def read_description(found: Found) -> dict[str, Any] | None:
    """``run.json`` of the training that it comes from, if that was one of this suite."""
    return _kept_description(found.path) if found.kind == "safetensors" else found.description


def _kept_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(read_metadata(path)[RUN_KEY])
        {**description["config"]["model"], **description["layout"]}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path} does not say what model it is; merge writes files that do, from-hf reads a folder with config.json"
        ) from None
    return description
