"""What is known of a checkpoint without reading its weights. No torch here."""

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.checkpoint.manifest import MANIFEST, check_content, read_manifest
from megatron.checkpoint.saved_run import RUN_FILE, SavedRun
from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError
from megatron.model.architectures import BERT, GPT2, architecture_of
from megatron.model.spec import ArchitectureSpec
from megatron.tools.convert.huggingface_files import from_huggingface
from megatron.tools.convert.kinds import HF_CONFIG, Found, read_json, read_metadata


def verify_weights(saved: SavedRun) -> None:
    """Raise CheckpointError as ``verify`` does, for the files that the weights are read from."""
    verify(saved.path, "*" if saved.layout.zero_stage == 3 else "*model_states.pt")


def verify(tag_folder: Path, pattern: str = "*") -> str:
    """What comes of comparing the files that match ``pattern`` with the sizes and SHA-256 of the manifest, in words.

    Raises CheckpointError with a line for each file that is missing or another than the one that was saved.
    """
    manifest = {name: record for name, record in read_manifest(tag_folder).items() if fnmatch(name, pattern)}
    total = sum(record.size for record in manifest.values())
    problems: list[str] = []
    with tqdm(total=total, unit="B", unit_scale=True, desc="checking", disable=None) as progress:
        for name, record in manifest.items():
            try:
                check_content(tag_folder / name, record)
            except CheckpointError as error:
                problems += error.messages
            progress.update(record.size)
    if problems:
        raise CheckpointError(problems)
    return f"yes: {len(manifest)} files, {total:,} bytes, as {MANIFEST} says"


_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "ffn_hidden_size": "inside the MLP",
    "max_position_embeddings": "positions",
    "vocab_size": "tokens",
}
_LOADERS = {
    GPT2.name: {
        "folder": ("tools/generate.py", "tools/convert_checkpoint.py merge, to-hf"),
        "tag": ("tools/generate.py", "tools/convert_checkpoint.py merge, to-hf"),
        "universal": ("DeepSpeed with load_universal", "tools/generate.py", "tools/convert_checkpoint.py merge, to-hf"),
        "safetensors": ("safetensors.torch.load_file", "tools/generate.py", "tools/convert_checkpoint.py to-hf"),
        "huggingface": ("transformers.GPT2LMHeadModel", "tools/generate.py", "tools/convert_checkpoint.py from-hf"),
    },
    BERT.name: {
        "folder": ("tools/convert_checkpoint.py merge",),
        "tag": ("tools/convert_checkpoint.py merge",),
        "universal": ("DeepSpeed with load_universal", "tools/convert_checkpoint.py merge"),
        "safetensors": ("safetensors.torch.load_file",),
    },
}
"""What else takes each kind of checkpoint of each model."""


def facts(found: Found, description: Mapping[str, Any] | None, config: ModelConfig | None) -> dict[str, Any]:
    """What a checkpoint is, and where it comes from, as ``run.json`` or the header of merged weights says."""
    told: dict[str, Any] = {"path": str(found.path), "kind": found.what}
    if found.kind == "folder":
        told["newest"] = found.saved.tag
        told["tags"] = sorted(file.parent.name for file in found.path.glob(f"*/{RUN_FILE}"))
    if description is not None:
        told |= {name: description.get(name) for name in ("iteration", "consumed_samples", "consumed_tokens")}
        told["layout"] = description["layout"]
        told["holds"] = _holds(found, description)
    if config is not None:
        told["model"] = {words: getattr(config, name) for name, words in _SIZES.items()}
    architecture = GPT2 if config is None else architecture_of(config)
    return told | {"loaded_by": loaders(found, description, architecture)}


def integrity(found: Found) -> str:
    """Whether it is whole, in words. Raises CheckpointError where it is known not to be."""
    if found.kind in ("tag", "folder"):
        return verify(found.saved.path)
    return "no manifest: what was saved is not known"


def loaders(found: Found, description: Mapping[str, Any] | None, architecture: ArchitectureSpec) -> list[str]:
    """Which programs take it, and for what."""
    others = list(_LOADERS.get(architecture.name, _LOADERS[BERT.name])[found.kind])
    if found.kind not in ("folder", "tag"):
        return others
    how = "to go on" if description["has_optimizer"] else "with --finetune, for it has no optimizer"
    via = "" if found.kind == "folder" else f", where {found.path.parent / 'latest'} names it"
    return [f"{architecture.program} --load {how}{via}", *others]


def _holds(found: Found, description: Mapping[str, Any]) -> list[str]:
    if found.kind == "safetensors":
        return ["weights"]
    has_rng = description.get("has_rng") and found.kind != "universal"
    state = {"the optimizer": description.get("has_optimizer"), "random streams": has_rng}
    return ["weights", *(name for name, is_there in state.items() if is_there)]


RUN_KEY = "run"
"""Where the header of merged weights keeps ``run.json``."""


def read_config(found: Found, *, vocab_size: int | None = None) -> ModelConfig | None:
    """What model it is, if anything says so. ``vocab_size`` is that of a Hugging Face folder's tokenizer, if known."""
    if found.kind == "huggingface":
        return from_huggingface(read_json(found.path / HF_CONFIG), found.path / HF_CONFIG, vocab_size=vocab_size)
    description = read_description(found)
    if description is None:
        return None
    return SavedRun(found.path.parent, found.path.name, description).whole_model_config()


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
