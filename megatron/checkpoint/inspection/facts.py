"""What is known of a checkpoint without reading its weights. No torch here."""

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.exchange.kinds import Found
from megatron.checkpoint.inspection.integrity import verify
from megatron.checkpoint.tracker import RUN_FILE
from megatron.config import ModelConfig
from megatron.config.architecture import ARCHITECTURES, BERT, GPT2, Architecture

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
    architecture = GPT2 if config is None else ARCHITECTURES[config.architecture]
    return told | {"loaded_by": loaders(found, description, architecture)}


def integrity(found: Found) -> str:
    """Whether it is whole, in words. Raises CheckpointError where it is known not to be."""
    if found.kind in ("tag", "folder"):
        return verify(found.saved.folder / found.saved.tag)
    return "no manifest: what was saved is not known"


def loaders(found: Found, description: Mapping[str, Any] | None, architecture: Architecture) -> list[str]:
    """Which programs take it, and for what."""
    others = list(_LOADERS[architecture.name][found.kind])
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
