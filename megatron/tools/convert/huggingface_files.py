"""Hugging Face's config.json and tokenizer files of a GPT-2, to and from ours. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError, ConfigError, DataError
from megatron.config.reading import parse_json, read_bytes
from megatron.model.architectures import GPT2
from megatron.tokenizer.base import EOD, check_ids
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer, read_byte_vocabulary, read_merges

HF_CONFIG = "config.json"
GELU_KINDS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
"""Hugging Face's activations, and whether each is OpenAI's tanh approximation. The first name of each is written."""

_DEFAULTS = {
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
}
"""Hugging Face's defaults for what config.json lacks."""

_FIXED = {
    "model_type": "gpt2",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Settings that have other values there, but not here."""

_SIZES = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "n_inner")


def to_huggingface(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32).

    Raises ConfigError with a line for each setting that Hugging Face's GPT-2 does not have.
    """
    if config.architecture != GPT2.name:
        raise ConfigError(f"the model is {config.architecture}, and to-hf supports {GPT2.name} only; use merge")
    problems = []
    if config.apply_residual_connection_post_layernorm:
        problems.append("--apply-residual-connection-post-layernorm, so its residual is taken after the norm")
    if config.pre_tokens < config.max_position_embeddings - 1:
        problems.append(
            f"--pre-tokens {config.pre_tokens}, so its attention sees less than its "
            f"{config.max_position_embeddings} positions"
        )
    if problems:
        raise ConfigError(
            f"the model was trained with {problem}; Hugging Face's GPT-2 does not support that; use merge"
            for problem in problems
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        **_FIXED,
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "n_inner": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.eod_token,
        "eos_token_id": config.eod_token,
        "activation_function": next(name for name, tanh in GELU_KINDS.items() if tanh == config.openai_gelu),
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "torch_dtype": dtype,
    }


def from_huggingface(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that the config.json at ``path`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    values = {name: tree.get(name, default) for name, default in _DEFAULTS.items()}
    problems = [
        f"{path}: {name} is {tree[name]!r}, and only {value!r} can be taken over"
        for name, value in _FIXED.items()
        if name in tree and tree[name] != value
    ]
    problems += [
        f"{path}: {name} is {values[name]!r}, and should be a whole number above 0"
        for name in _SIZES
        if not (type(values[name]) is int and values[name] > 0 or name == "n_inner" and values[name] is None)
    ]
    problems += [
        f"{path}: {name} is {values[name]!r}, and should be a number"
        for name in ("layer_norm_epsilon", "resid_pdrop", "attn_pdrop", "initializer_range")
        if type(values[name]) not in (int, float)
    ]
    if str(values["activation_function"]) not in GELU_KINDS:
        problems.append(
            f"{path}: activation_function is {values['activation_function']!r}, and can be {' or '.join(GELU_KINDS)}"
        )
    if not problems and values["n_embd"] % values["n_head"]:
        problems.append(f"{path}: n_embd {values['n_embd']} is not a multiple of n_head {values['n_head']}")
    if not problems and vocab_size is not None and vocab_size > values["vocab_size"]:
        problems.append(f"{path}: vocab_size is {values['vocab_size']}, and its tokenizer has {vocab_size} tokens")
    if problems:
        raise CheckpointError(problems)
    tokens = vocab_size or values["vocab_size"]
    eod = tree.get("eos_token_id")
    return ModelConfig(
        num_layers=values["n_layer"],
        hidden_size=values["n_embd"],
        num_attention_heads=values["n_head"],
        max_position_embeddings=values["n_positions"],
        ffn_hidden_size=values["n_inner"] or 4 * values["n_embd"],
        openai_gelu=GELU_KINDS[values["activation_function"]],
        layernorm_epsilon=values["layer_norm_epsilon"],
        hidden_dropout=values["resid_pdrop"],
        attention_dropout=values["attn_pdrop"],
        init_method_std=values["initializer_range"],
        vocab_size=tokens,
        padded_vocab_size=tokens,
        eod_token=eod if type(eod) is int else tokens - 1,
    )


VOCAB, MERGES = "vocab.json", "merges.txt"


@dataclass(frozen=True)
class BPE:
    """A byte-level BPE, as in GPT-2's two files."""

    vocabulary: Mapping[str, int]
    merges: Sequence[tuple[str, str]]

    def write(self, folder: Path) -> None:
        """Write ``vocab.json`` and ``merges.txt``."""
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")

    def files(self) -> dict[str, str]:
        """Name and content of both files."""
        lines = ["#version: 0.2", *(f"{left} {right}" for left, right in self.merges)]  # Hugging Face ignores the first
        vocabulary = json.dumps(dict(self.vocabulary), ensure_ascii=False)
        return {VOCAB: vocabulary + "\n", MERGES: "\n".join(lines) + "\n"}


def read_bpe(vocab_file: str | None, merge_file: str | None) -> BPE:
    """The tokenizer in two files. Raises DataError if they are missing or broken, or do not match."""
    GPT2BPETokenizer(vocab_file, merge_file)
    assert vocab_file is not None and merge_file is not None, "the tokenizer has checked them"
    vocabulary = read_byte_vocabulary(vocab_file)
    return BPE(vocabulary, read_merges(merge_file, vocabulary))


def read_run_bpe(description: Mapping[str, Any], vocab_file: str | None, merge_file: str | None) -> BPE | None:
    """The tokenizer of a training run, from the given files or those in its ``run.json``; None if it has no BPE.

    Raises DataError as ``read_bpe``, and if its size is not the model's.
    """
    data, model = description["config"]["data"], description["config"]["model"]
    if data["tokenizer_type"] == "GPT2BPETokenizer":
        vocab_file, merge_file = vocab_file or data["vocab_file"], merge_file or data["merge_file"]
    if vocab_file is merge_file is None:
        return None
    bpe = read_bpe(vocab_file, merge_file)
    if len(bpe.vocabulary) != model["vocab_size"]:
        raise DataError(
            f"{vocab_file} has {len(bpe.vocabulary)} tokens, and the model {model['vocab_size']}; "
            "give the --vocab-file and the --merge-file that it was trained with"
        )
    return bpe


def read_folder_bpe(folder: Path) -> BPE | None:
    """The tokenizer of a Hugging Face folder, from two files or from ``tokenizer.json``; None if there is none.

    Raises CheckpointError or DataError if it cannot be used.
    """
    if (folder / VOCAB).exists() and (folder / MERGES).exists():
        return read_bpe(str(folder / VOCAB), str(folder / MERGES))
    whole = folder / "tokenizer.json"
    if not whole.exists():
        return None
    tree = read_json(whole)
    try:
        model = tree["model"]
        added = {token["content"]: token["id"] for token in tree.get("added_tokens", ())}
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        bpe = BPE({**model["vocab"], **added}, [(left, right) for left, right in merges])
        is_bpe = model["type"] == "BPE"
    except (KeyError, TypeError, AttributeError, ValueError):
        is_bpe = False
    if not is_bpe:
        raise CheckpointError(
            f"{whole} is not a byte-level BPE, which GPT-2 uses; move the file away to convert without it"
        )
    check_ids(str(whole), bpe.vocabulary)
    return bpe


def write_folder_bpe(bpe: BPE, folder: Path, *, positions: int) -> None:
    """Write the two files and Hugging Face's ``tokenizer_config.json``."""
    bpe.write(folder)
    settings: dict[str, Any] = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": positions,
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOD),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if there is none."""
    try:
        tree = parse_json(read_bytes(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # of JSON, of UTF-8, and of too many nested brackets
        raise CheckpointError(f"{path} is not JSON ({error}); is the file complete?") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is a JSON {type(tree).__name__}, and should be an object")
    return tree
