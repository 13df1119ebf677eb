"""Tokenizer files of a Hugging Face folder, to and from ours. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.errors import CheckpointError, DataError
from megatron.config.huggingface import HF_CONFIG, read_json
from megatron.tokenizer.base import EOD, check_ids
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer, read_byte_vocabulary, read_merges

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


CARRIED = (
    HF_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files of a Hugging Face folder that from-hf and to-hf copy."""


def carried_files(folder: Path) -> dict[str, Path]:
    """The files in ``folder`` that are copied, by name."""
    return {name: folder / name for name in CARRIED if (folder / name).is_file()}


def files_for_huggingface(folder: Path | None, description: Mapping[str, Any]) -> dict[str, Path]:
    """The files to copy for a model with this ``run.json``, saved in ``folder``.

    They are there if from-hf has written it; otherwise in the folder that the run trained on from or, without a
    config.json, in that of its tokenizer.
    """
    config = description["config"]
    loaded = (config.get("checkpoint", {}).get(name) for name in ("load_hf", "load"))
    for place in (folder, *loaded):
        if place is not None and HF_CONFIG in (found := carried_files(Path(place))):
            return found
    tokenizer = config.get("data", {}).get("tokenizer_model")
    return carried_files(Path(tokenizer)) if tokenizer is not None else {}


def count_tokens(folder: Path) -> int | None:
    """Tokens of the ``tokenizer.json`` in a Hugging Face folder, added ones included; None if there is none.

    Raises CheckpointError if it is broken.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    tree = read_json(file)
    try:
        model = tree["model"]["vocab"]
        ids = list(model.values()) if isinstance(model, dict) else list(range(len(model)))
        return max([*ids, *(token["id"] for token in tree.get("added_tokens") or ())]) + 1
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{file} is not a tokenizer: it has no vocabulary") from None
