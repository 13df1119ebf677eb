"""Kinds of tokenizers, and the files that each kind reads."""

import os
from collections.abc import Mapping

from megatron.common.errors import DataError
from megatron.common.reading import read_json

GPT2_BPE = "GPT2BPETokenizer"
HUGGINGFACE = "HuggingFaceTokenizer"
"""Kind of a tokenizer.json, as models on Hugging Face have it."""
SENTENCEPIECE = "GPTSentencePieceTokenizer"
"""Kind of a SentencePiece model, a file such as tokenizer.model."""
NULL_TOKENIZER = "NullTokenizer"
"""Kind of the tokenizer without files."""
CHAT_TEMPLATE, OTHER_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""File of the chat template in the folder of a tokenizer, and folder of further ones, such as tool_use.jinja."""
SPELLINGS: Mapping[str, str] = {"HFTokenizer": HUGGINGFACE, "Llama2Tokenizer": SENTENCEPIECE}
"""Other names of kinds of tokenizers, in Megatron-DeepSpeed and Megatron-LM."""
TOKENIZER_FILES: Mapping[str, tuple[str, ...]] = {
    GPT2_BPE: ("vocab.json", "merges.txt"),
    "WhitespaceTokenizer": ("vocab.json",),
    "BertWordPieceLowerCase": ("vocab.txt",),
    "BertWordPieceCase": ("vocab.txt",),
    HUGGINGFACE: ("tokenizer.json",),
    SENTENCEPIECE: ("tokenizer.model",),
}
"""File names of vocabulary and merges in a folder of --tokenizer-model, by kind."""
PUBLISHED = (HUGGINGFACE, SENTENCEPIECE)
"""Kinds with a single file, which --tokenizer-model may name, and with a configurable end-of-document token."""
TOKENIZER_TYPES = (*TOKENIZER_FILES, *SPELLINGS)
"""Values of --tokenizer-type with files."""


def tokenizer_kind(chosen: str | None, model: str | None, default: str = GPT2_BPE) -> str:
    """The kind of tokenizer for ``chosen``, the value of --tokenizer-type, and ``model``, of --tokenizer-model.

    The files of ``model`` decide between the kinds of ``PUBLISHED``: a folder without tokenizer.json may have a
    tokenizer.model. Without ``chosen`` the kind is ``default``, or a kind of ``PUBLISHED`` if ``default`` is GPT-2's
    BPE and ``model`` lacks its files.
    """
    kind = SPELLINGS.get(chosen or default, chosen or default)
    has = {kind: model is not None and _has_files(kind, model) for kind in (GPT2_BPE, *PUBLISHED)}
    if chosen is None and kind == GPT2_BPE and not has[kind]:
        return next((other for other in PUBLISHED if has[other]), kind)
    if kind in PUBLISHED and not has[kind]:
        return next((other for other in PUBLISHED if has[other]), kind)
    return kind


def _has_files(kind: str, model: str) -> bool:
    """Whether ``model`` is a folder with the files of ``kind``, or by its name the single file of ``kind``."""
    if os.path.isfile(model):
        return kind in PUBLISHED and model.endswith(os.path.splitext(TOKENIZER_FILES[kind][0])[1])
    return all(os.path.lexists(os.path.join(model, name)) for name in TOKENIZER_FILES[kind])


def used_merges(tokenizer_type: str, merge_file: str | None) -> str | None:
    """The merge file that a tokenizer reads: ``merge_file``, or None for kinds without merge file."""
    return None if tokenizer_type in ("WhitespaceTokenizer", *PUBLISHED) else merge_file


def unused_merges(tokenizer_type: str, merge_file: str | None) -> list[str]:
    """A warning if a merge file is given but not read, else empty."""
    if merge_file == used_merges(tokenizer_type, merge_file):
        return []
    return [f"--merge-file {merge_file} is not used: {tokenizer_type} has no merges"]


def other_words(kind: str, vocab_file: str | None, *, add_prefix_space: bool = False) -> list[str]:
    """A warning if a tokenizer.json next to the vocabulary of GPT-2's BPE divides text in another way, else empty.

    With ``add_prefix_space`` GPT-2's way has a space in front of each text.
    """
    file = os.path.join(os.path.dirname(vocab_file or ""), TOKENIZER_FILES[HUGGINGFACE][0])
    if kind != GPT2_BPE or not os.path.isfile(file):
        return []
    try:
        tree = read_json(file)
        words = {"use_regex": True, **tree["pre_tokenizer"]}
        expected = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "use_regex": True}
        is_gpt2s = words.items() >= expected.items() and tree.get("normalizer") is None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        is_gpt2s = False
    remedy = f"use --tokenizer-type {HUGGINGFACE} for the tokens of its model"
    return [] if is_gpt2s else [f"{file} divides text in another way than GPT-2's BPE: {remedy}"]


def tokenizer_files(
    kind: str, vocab_file: str | None, merge_file: str | None, model: str | None
) -> tuple[str | None, str | None]:
    """The vocabulary and merge file of a tokenizer: from ``model``, or ``vocab_file`` and ``merge_file``.

    ``model`` is a folder, or the single file of a kind of ``PUBLISHED``. Without ``merge_file``, GPT-2's BPE reads the
    file next to the vocabulary with a matching name (gpt2-merges.txt for gpt2-vocab.json), or merges.txt; None if
    neither exists.
    """
    if model is not None and kind in PUBLISHED and os.path.isfile(model):
        vocab_file, merge_file = model, None
    elif model is not None and kind in TOKENIZER_FILES:
        vocab_file, merge_file, *_ = *(os.path.join(model, name) for name in TOKENIZER_FILES[kind]), None, None
    if kind == GPT2_BPE and vocab_file is not None and merge_file is None:
        place, name = os.path.split(vocab_file)
        paired = os.path.splitext(name.replace("vocab", "merges"))[0] + ".txt"
        beside = (os.path.join(place, other) for other in (paired, "merges.txt") if other != name)
        merge_file = next(filter(os.path.lexists, beside), None)
    return vocab_file, merge_file


def check_tokenizer_folder(kind: str, model: str | None) -> None:
    """Raises DataError if ``model`` is given but lacks the files of ``kind``."""
    names = TOKENIZER_FILES.get(kind, ())
    if model is None or not names or (kind in PUBLISHED and os.path.isfile(model)):
        return
    if not os.path.isdir(model):
        problem = "a file" if os.path.exists(model) else "no such folder"
        download = "; no files are downloaded from the Hugging Face Hub" if kind in PUBLISHED else ""
        raise DataError(f"--tokenizer-model {model}: {problem}; name the folder with {' and '.join(names)}{download}")
    if absent := [name for name in names if not os.path.lexists(os.path.join(model, name))]:
        other = f"{kind} reads {' and '.join(names)}"
        if kind not in PUBLISHED and (published := [other for other in PUBLISHED if _has_files(other, model)]):
            name = TOKENIZER_FILES[published[0]][0]
            other = f"its {name} is not what {kind} reads"
            if not kind.startswith("Bert"):
                other += f"; use --tokenizer-type {published[0]}"
        raise DataError(f"--tokenizer-model {model}: no {' and no '.join(absent)} in it; {other}")
