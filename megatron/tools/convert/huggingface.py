"""The weights of GPT-2, to and from those of Hugging Face's GPT2LMHeadModel.

n heads, d size of a head, h hidden
"""

import json
import re
from pathlib import Path

from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError
from megatron.tools.convert.huggingface_files import (
    BPE,
    HF_CONFIG,
    from_huggingface,
    read_json,
    to_huggingface,
    write_folder_bpe,
)
from megatron.tools.convert.whole_model import (
    WholeModel,
    check_sizes,
    gpt2_names,
    in_order,
    read_tensors,
    write_tensors,
)

_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""Older files hold the causal mask, too."""
_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_LINEARS = {
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
"""Theirs are Conv1D: y = x W + b, where ours is y = x W^T + b."""


def write_huggingface(folder: Path, model: WholeModel, bpe: BPE | None, *, max_shard_size: int) -> None:
    """Write ``config.json``, the weights, and the tokenizer if there is one, into ``folder``, which is created.

    Raises ConfigError if Hugging Face's GPT-2 does not support a setting, ResourceError if the disk is too small.
    """
    dtype = str(model.weights[gpt2_names(model.config).words].dtype).removeprefix("torch.")
    config = to_huggingface(model.config, dtype)
    folder.mkdir(exist_ok=True)
    (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(_outward_all(model), folder, max_shard_size=max_shard_size, metadata={})
    if bpe is not None:
        write_folder_bpe(bpe, folder, positions=model.config.max_position_embeddings)


def _outward_all(model: WholeModel) -> dict[str, Tensor]:
    """The state of GPT2LMHeadModel, its head left out, which is tied to the embedding."""
    names = _names(model.config)
    return {_PREFIX + names[name]: _outward(name, tensor, model.config) for name, tensor in model.weights.items()}


def read_huggingface(folder: Path, *, vocab_size: int | None = None) -> WholeModel:
    """The GPT-2 in a Hugging Face folder.

    If its tokenizer has only ``vocab_size`` tokens, further rows of the table, which are padding, are dropped.
    Raises CheckpointError for a model that is none of ours, and for files that are missing or not whole.
    """
    config = from_huggingface(read_json(folder / HF_CONFIG), folder / HF_CONFIG, vocab_size=vocab_size)
    theirs = {name.removeprefix(_PREFIX): tensor for name, tensor in read_tensors(folder).items()}
    check_sizes(config, len(theirs), str(folder))
    head = theirs.pop(_HEAD, None)
    if head is not None and "wte.weight" in theirs and not head.equal(theirs["wte.weight"]):
        raise CheckpointError(
            f"{folder}: {_HEAD} is another table than wte.weight; here both ends of a model share one"
        )
    ours = {hf_name: name for name, hf_name in _names(config).items()}
    weights = {ours.get(name, name): tensor for name, tensor in theirs.items() if not _MASK.fullmatch(name)}
    words = gpt2_names(config).words
    weights = in_order(
        {name: _turned(name, tensor, vocab_size if name == words else None) for name, tensor in weights.items()},
        config,
        str(folder),
    )
    return WholeModel(config, {name: _by_heads(name, tensor, config).contiguous() for name, tensor in weights.items()})


def _names(config: ModelConfig) -> dict[str, str]:
    """Our name of each weight -> theirs, without the prefix."""
    spec = gpt2_names(config)
    names = {spec.words: "wte.weight", spec.positions: "wpe.weight"}
    parts = [
        *(
            (prefix + ours, f"h.{layer}.{theirs}")
            for layer, prefix in enumerate(spec.blocks)
            for ours, theirs in {**_NORMS, **_LINEARS}.items()
        ),
        (spec.norm.removesuffix("."), "ln_f"),
    ]
    return names | {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in parts for kind in ("weight", "bias")}


def _is_matrix(name: str) -> bool:
    return any(name.endswith(f"{linear}.weight") for linear in _LINEARS)


def _outward(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    if "query_key_value" in name:  # [n, 3, d, ..] -> [3, n, d, ..]
        tensor = tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.t().contiguous() if _is_matrix(name) else tensor.contiguous()


def _turned(name: str, tensor: Tensor, vocab_size: int | None) -> Tensor:
    if tensor.dim() != 2:
        return tensor
    if _is_matrix(name):
        return tensor.t()
    return tensor[:vocab_size]


def _by_heads(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    if "query_key_value" not in name:
        return tensor
    # [3, n, d, ..] -> [n, 3, d, ..]
    return tensor.unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)
