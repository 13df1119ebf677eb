"""The tokenizer of a Hugging Face GPT-2 folder: read, and written beside exported weights. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.exchange.kinds import read_json
from megatron.errors import CheckpointError, DataError
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer, read_merges
from megatron.tokenizer.vocabulary import EOD, check_ids, read_vocab_json

VOCAB, MERGES = "vocab.json", "merges.txt"


@dataclass(frozen=True)
class BPE:
    """A byte-level BPE, as GPT-2's two files have it."""

    vocabulary: Mapping[str, int]
    merges: Sequence[tuple[str, str]]

    def write(self, folder: Path) -> None:
        """Write ``vocab.json`` and ``merges.txt``."""
        (folder / VOCAB).write_text(json.dumps(dict(self.vocabulary), ensure_ascii=False) + "\n", encoding="utf-8")
        # Hugging Face passes over the first line, whatever it says.
        lines = ["#version: 0.2", *(f"{left} {right}" for left, right in self.merges)]
        (folder / MERGES).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_bpe(vocab_file: str | None, merge_file: str | None) -> BPE:
    """The tokenizer of two files. Raises DataError where they are absent, broken, or do not fit each other."""
    GPT2BPETokenizer(vocab_file, merge_file)
    vocabulary = read_vocab_json(vocab_file, required=(EOD,))
    return BPE(vocabulary, read_merges(merge_file, vocabulary))


def read_run_bpe(description: Mapping[str, Any], vocab_file: str | None, merge_file: str | None) -> BPE | None:
    """The tokenizer of a training, from the files it names in ``run.json`` or from others; None where it names no BPE.

    Raises DataError as ``read_bpe`` does, and where its size is not the model's.
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
    """The tokenizer of a Hugging Face folder, from two files or from ``tokenizer.json``; None where there is none.

    Raises CheckpointError or DataError where it is there and cannot be used.
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
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        bpe = BPE({**model["vocab"], **added}, merges)
        is_bpe = model["type"] == "BPE" and all(len(merge) == 2 for merge in merges)
    except (KeyError, TypeError, AttributeError):
        is_bpe = False
    if not is_bpe:
        raise CheckpointError(f"{whole} is no byte-level BPE, which GPT-2's tokenizer is; move it away to go without")
    check_ids(str(whole), bpe.vocabulary)
    return bpe


def write_folder_bpe(bpe: BPE, folder: Path, *, positions: int) -> None:
    """Write the two files, and what Hugging Face wants to know of them."""
    bpe.write(folder)
    settings: dict[str, Any] = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": positions,
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOD),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
