"""Tokenizer files of a Hugging Face folder, to and from ours. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from megatron.common.errors import CheckpointError, DataError
from megatron.config import ModelConfig
from megatron.config.tokenizer_files import GPT2_BPE, tokenizer_files
from megatron.model.architectures import BERT
from megatron.model.huggingface import BERT_FORMAT, GPT2_FORMAT, HF_CONFIG, T5_FORMAT, format_of, read_json
from megatron.tokenizer.base import EOD, check_ids
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer, read_byte_vocabulary, read_merges
from megatron.tokenizer.wordpiece import PAD, WordPieceTokenizer, check_special, read_pieces

VOCAB, MERGES, PIECES = "vocab.json", "merges.txt", "vocab.txt"
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
LOWER_CASE, CASED = BERT.tokenizers


@dataclass(frozen=True)
class BPE:
    """A byte-level BPE, as in GPT-2's two files."""

    vocabulary: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    kind: ClassVar[str] = GPT2_BPE
    names: ClassVar[tuple[str, str]] = (VOCAB, MERGES)
    """Of its files."""
    model_settings: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Mapping[str, Any]] = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOD),
    }

    def __len__(self) -> int:
        return len(self.vocabulary)

    def write(self, folder: Path) -> None:
        """Write ``vocab.json`` and ``merges.txt``."""
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")

    def files(self) -> dict[str, str]:
        """Name and content of both files."""
        lines = ["#version: 0.2", *(f"{left} {right}" for left, right in self.merges)]  # Hugging Face ignores the first
        vocabulary = json.dumps(dict(self.vocabulary), ensure_ascii=False)
        return {VOCAB: vocabulary + "\n", MERGES: "\n".join(lines) + "\n"}


@dataclass(frozen=True)
class WordPieces:
    """BERT's WordPiece: the pieces of its ``vocab.txt``, and whether texts become lower case first."""

    pieces: Mapping[str, int]
    lower_case: bool
    names: ClassVar[tuple[str, None]] = (PIECES, None)

    @property
    def kind(self) -> str:
        """The value of ``--tokenizer-type``."""
        return LOWER_CASE if self.lower_case else CASED

    @property
    def settings(self) -> dict[str, Any]:
        """What ``tokenizer_config.json`` says of it."""
        return {"tokenizer_class": "BertTokenizer", "do_lower_case": self.lower_case}

    @property
    def model_settings(self) -> dict[str, Any]:
        """What the model's ``config.json`` says of it."""
        return {"pad_token_id": self.pieces[PAD]}

    def __len__(self) -> int:
        return len(self.pieces)

    def write(self, folder: Path) -> None:
        """Write ``vocab.txt``."""
        lines = sorted(self.pieces, key=self.pieces.__getitem__)
        (folder / PIECES).write_text("".join(f"{piece}\n" for piece in lines), encoding="utf-8")


Vocabulary: TypeAlias = BPE | WordPieces
"""A tokenizer that is converted. Those of the Llama family are copied as they are."""


def read_bpe(vocab_file: str | None, merge_file: str | None) -> BPE:
    """The tokenizer in two files. Raises DataError if they are missing or broken, or do not match."""
    GPT2BPETokenizer(vocab_file, merge_file)
    assert vocab_file is not None and merge_file is not None, "the tokenizer has checked them"
    vocabulary = read_byte_vocabulary(vocab_file)
    return BPE(vocabulary, read_merges(merge_file, vocabulary))


def read_word_pieces(vocab_file: str, merge_file: str | None, *, lower_case: bool) -> WordPieces:
    """The tokenizer in a ``vocab.txt``. Raises DataError if it is missing or broken, or merges are given."""
    WordPieceTokenizer(vocab_file, merge_file, lower_case=lower_case)
    return WordPieces(read_pieces(vocab_file), lower_case)


def read_run_tokenizer(
    description: Mapping[str, Any], config: ModelConfig, vocab_file: str | None, merge_file: str | None
) -> Vocabulary | None:
    """The tokenizer of a training run, from the given files or those in its ``run.json``.

    None if it is no BPE of GPT-2 or WordPiece of BERT, or is T5's. Raises DataError as ``read_bpe``, and if its size
    is not that of the model.
    """
    data = description["config"]["data"]
    kind, is_bert = data["tokenizer_type"], format_of(config) is BERT_FORMAT
    if format_of(config) is T5_FORMAT:
        return None  # transformers has no WordPiece with sentinels
    if kind in (GPT2_BPE, LOWER_CASE, CASED):
        vocab_file, merge_file = vocab_file or data["vocab_file"], merge_file or data["merge_file"]
    if not is_bert:
        vocab_file, merge_file = tokenizer_files(GPT2_BPE, vocab_file, merge_file, None)
    if vocab_file is merge_file is None:
        return None
    tokenizer: Vocabulary
    if is_bert and vocab_file is not None:
        tokenizer = read_word_pieces(vocab_file, merge_file, lower_case=kind != CASED)
    else:
        tokenizer = read_bpe(vocab_file, merge_file)
    if len(tokenizer) != config.vocab_size:
        flags = "the --vocab-file" if is_bert else "the --vocab-file and the --merge-file"
        raise DataError(
            f"{vocab_file} has {len(tokenizer)} tokens, and the model {config.vocab_size}; give {flags} that it was "
            "trained with"
        )
    return tokenizer


def read_folder_tokenizer(folder: Path, config: ModelConfig) -> Vocabulary | None:
    """The tokenizer of a Hugging Face folder with the model ``config``; None if it is not converted, or there is none.

    Raises CheckpointError or DataError if it cannot be used.
    """
    form = format_of(config)
    return (
        read_folder_bpe(folder)
        if form is GPT2_FORMAT
        else read_folder_word_pieces(folder)
        if form is BERT_FORMAT
        else None
    )


def read_folder_bpe(folder: Path) -> BPE | None:
    """The tokenizer of a Hugging Face folder, from two files or from ``tokenizer.json``; None if there is none.

    Raises CheckpointError or DataError if it cannot be used.
    """
    if (folder / VOCAB).exists() and (folder / MERGES).exists():
        return read_bpe(str(folder / VOCAB), str(folder / MERGES))
    if not (file := folder / TOKENIZER).exists():
        return None
    vocabulary, tree = _read_tokenizer_json(file, "BPE", "a byte-level BPE, which GPT-2 uses")
    try:
        merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in tree["model"]["merges"])
        return BPE(vocabulary, [(left, right) for left, right in merges])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file} has no merges; move the file away to convert without it") from None


def read_folder_word_pieces(folder: Path) -> WordPieces | None:
    """BERT's tokenizer in a Hugging Face folder, from ``vocab.txt`` or ``tokenizer.json``; None if there is none.

    Raises CheckpointError or DataError if it cannot be used.
    """
    if (folder / PIECES).exists():
        settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
        return read_word_pieces(str(folder / PIECES), None, lower_case=bool(settings.get("do_lower_case", True)))
    if not (file := folder / TOKENIZER).exists():
        return None
    pieces, tree = _read_tokenizer_json(file, "WordPiece", "a WordPiece, which BERT uses")
    check_special(str(file), pieces)
    normalizer = tree.get("normalizer")
    return WordPieces(pieces, isinstance(normalizer, dict) and bool(normalizer.get("lowercase")))


def _read_tokenizer_json(file: Path, kind: str, what: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The vocabulary in a ``tokenizer.json``, added tokens included, and all of its content.

    Raises CheckpointError unless its model is of ``kind``, which messages call ``what``; DataError for ids with gaps.
    """
    tree = read_json(file)
    try:
        is_kind = tree["model"]["type"] == kind
        added = {token["content"]: token["id"] for token in tree.get("added_tokens", ())}
        vocabulary = {**tree["model"]["vocab"], **added}
    except (KeyError, TypeError, AttributeError, ValueError):
        is_kind = False
    if not is_kind:
        raise CheckpointError(f"{file} is not {what}; move the file away to convert without it")
    check_ids(str(file), vocabulary)
    return vocabulary, tree


def write_tokenizer(tokenizer: Vocabulary, folder: Path, *, positions: int) -> None:
    """Write its files and Hugging Face's ``tokenizer_config.json``."""
    tokenizer.write(folder)
    settings = {"model_max_length": positions, **tokenizer.settings}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


CARRIED = (
    HF_CONFIG,
    TOKENIZER,
    SETTINGS,
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
    file = folder / TOKENIZER
    if not file.exists():
        return None
    tree = read_json(file)
    try:
        model = tree["model"]["vocab"]
        ids = list(model.values()) if isinstance(model, dict) else list(range(len(model)))
        return max([*ids, *(token["id"] for token in tree.get("added_tokens") or ())]) + 1
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{file} is not a tokenizer: it has no vocabulary") from None
