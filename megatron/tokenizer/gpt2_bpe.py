"""GPT-2's byte-level BPE (Radford et al., 2019), run by the Rust library ``tokenizers``.

If the library gigatoken is installed, it encodes texts, faster and to the same ids.
"""

import json
import os
from collections.abc import Sequence
from functools import cached_property
from threading import Lock

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.common.errors import DataError
from megatron.tokenizer.base import (
    EOD,
    RustTokenizer,
    check_texts,
    read_text,
    read_vocab_json,
    require_files,
    require_tokens,
)

Vocabulary = dict[str, int]
"""Token -> id; bytes of tokens are written as printable characters."""
Merges = list[tuple[str, str]]


class Gigatoken:
    """An encoder of the library gigatoken. Threads may share it; a lock serializes their calls."""

    def __init__(self, vocabulary: Vocabulary, merges: Merges) -> None:
        import gigatoken

        self._library, self._lock = gigatoken.Tokenizer.from_json(tokenizer_json(vocabulary, merges)), Lock()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 [tokens of the text].

        The library's methods for batches import the package awkward, which takes longer than encoding a few megabytes.
        """
        with self._lock:
            return [self._library.encode(text) for text in texts]


class GPT2BPETokenizer(RustTokenizer):
    """Byte-level BPE from GPT-2's two files. It encodes any text, and ``detokenize`` returns it unchanged.

    ``vocab.json`` maps tokens to ids, ``merges.txt`` holds one merge per line, in order of priority. Both write a byte
    as one printable character. No space is added before the text. ``<|endoftext|>`` in a text is tokenized as ordinary
    characters, so that a corpus cannot end documents by quoting the token; ``detokenize`` writes ``eod`` as
    ``<|endoftext|>``.
    """

    def __init__(self, vocab_file: str | None, merge_file: str | None):
        """Raises DataError if a file is absent or broken, or if the two do not fit each other."""
        files = {"--vocab-file": vocab_file, "--merge-file": merge_file}
        if merge_file is None and vocab_file is not None and os.path.isfile(vocab_file):
            read_byte_vocabulary(vocab_file)  # a vocabulary of words needs another tokenizer, not merges
        self.path, merge_path = require_files("GPT2BPETokenizer", files)
        vocabulary = read_byte_vocabulary(self.path)
        merges = read_merges(merge_path, vocabulary)
        self.vocab_size, self.eod = len(vocabulary), vocabulary[EOD]
        self._model = vocabulary, merges

    def tokenize_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text as an array of integers, [tokens of the text]. Raises as ``tokenize_batch``."""
        if self._gigatoken is None:
            return super().tokenize_arrays(texts)
        check_texts(texts)
        return self._gigatoken.encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._gigatoken is None:
            return super()._encode(texts)
        return [ids.tolist() for ids in self._gigatoken.encode(texts)]

    @cached_property
    def _encoder(self) -> tokenizers.Tokenizer:  # type: ignore[override]  # mypy takes it for a property
        """The library's tokenizer, made on first use: with gigatoken it is not needed to encode texts."""
        encoder = byte_level_bpe(*self._model)
        encoder.add_special_tokens([EOD])
        encoder.encode_special_tokens = True  # as ordinary text
        return encoder

    @cached_property
    def _gigatoken(self) -> "Gigatoken | None":
        """The encoder of gigatoken; None if the library is not installed."""
        try:
            return Gigatoken(*self._model)
        except ImportError:
            return None


def byte_level_bpe(vocabulary: Vocabulary, merges: Merges) -> tokenizers.Tokenizer:
    """A byte-level BPE of the library ``tokenizers``. Making it takes about as long as reading the files."""
    encoder = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    return encoder


def tokenizer_json(vocabulary: Vocabulary, merges: Merges) -> str:
    """The content of a tokenizer.json for ``byte_level_bpe``, without making the tokenizer."""
    content = json.loads(byte_level_bpe({}, []).to_str())
    content["model"] |= {"vocab": vocabulary, "merges": merges}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def read_byte_vocabulary(path: str) -> dict[str, int]:
    """The ids of a ``vocab.json`` of bytes, token -> id. Raises DataError if it is broken, or a byte has no token."""
    vocabulary = read_vocab_json(path)
    try:
        "".join(vocabulary).encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"U+{ord(error.object[error.start]):04X}, half of a surrogate pair"
        raise DataError(f"{path}: a token holds {what}; is this the right file?") from None
    check_byte_symbols(path, vocabulary)
    require_tokens(path, vocabulary, (EOD,))
    return vocabulary


def check_byte_symbols(path: str, vocabulary: dict[str, int]) -> None:
    """Raises DataError if some byte has no token: BPE would drop it from texts silently."""
    absent = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if absent:
        raise DataError(
            f"{path}: {len(absent)} of the 256 byte symbols have no token, {absent[0]!r} among them; "
            "this is not the vocabulary of a byte-level BPE; for one of whole words add --tokenizer-type "
            "WhitespaceTokenizer"
        )


def read_merges(path: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of a ``merges.txt``, in order.

    Raises DataError for a line that is not a pair, and for a pair whose parts or result are not in the vocabulary.
    """
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        # Only the first line can be a comment, since "#" is also a token.
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DataError(f"{path}:{number}: {line!r} is not a merge: two tokens separated by one space")
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise DataError(
                    f"{path}:{number}: merge {line!r} needs the token {token!r}, which the vocabulary lacks; "
                    "give the --vocab-file and the --merge-file of one training"
                )
        merges.append((left, right))
    return merges
