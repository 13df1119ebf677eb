"""Base classes of tokenizers, with and without the Rust library ``tokenizers``, and reading of vocabularies."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tokenizers

from megatron.common.errors import DataError, first_line
from megatron.common.reading import LARGEST_JSON, parse_json, read_bytes
from megatron.common.screen import buffered_stderr

EOD = "<|endoftext|>"
"""Token that ends a document."""
UNK = "<unk>"
"""Token for every word that is not in the vocabulary."""


class Tokenizer(ABC):
    """Base class: converts text to token ids, from 0 to ``vocab_size - 1``, and back."""

    vocab_size: int
    """Number of tokens in the vocabulary, including the end-of-document token."""
    eod: int
    """Id of the end-of-document token. Tokenizing a text never returns it."""
    other_ends: frozenset[int] = frozenset()
    """Further tokens at which a published model stops generating."""
    unk: int | None = None
    """Id of words that are not in the vocabulary; None if any text can be tokenized."""
    bos: int | None = None
    """Id of the beginning-of-sequence token, which ``tokenize`` does not add; None if the tokenizer has none."""
    adds_bos = False
    """Whether ``transformers`` begins each text with ``bos``."""
    opening: tuple[int, ...] = ()
    """Tokens with which a prompt begins."""
    source: tuple[str | None, ...] = ()
    """Kind and files of the tokenizer; empty if it was not built by ``build_tokenizer``."""
    tokens: int | None = None
    """Number of tokens of a published tokenizer, without padding rows of the model; None for other tokenizers."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``. Raises DataError as ``tokenize_batch``."""
        return self.tokenize_batch([text])[0]

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a generated text."""
        return self.other_ends | {self.eod}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text: the same as ``tokenize`` of each, but faster.

        Raises DataError for a text that UTF-8 cannot encode, or with a word of more than ``LONGEST_WORD`` characters.
        """
        check_texts(texts)
        return self._encode(texts)

    def tokenize_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text as an array of integers, [tokens of the text]: the fastest method."""
        return [np.array(ids, np.int32) for ids in self.tokenize_batch(texts)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8, such as half a character, become U+FFFD.

        Raises DataError for an id outside the vocabulary.
        """
        ids = [int(id) for id in ids]
        unknown = next((id for id in ids if not 0 <= id < self.vocab_size), None)
        if unknown is not None:
            raise DataError(
                f"token {unknown} is not in the vocabulary of {self.vocab_size} tokens; "
                "use the vocabulary that the tokens were made with"
            )
        return self._decode(ids)

    def respelled_tokens(self, text: str, tokens: Collection[str]) -> Counter[str]:
        """How often the tokenizer reads each of ``tokens`` in ``text`` that may be spelled in another way there."""
        return Counter()

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids of the vocabulary."""


@contextmanager
def library_errors(path: str, task: str = "encode this text") -> Iterator[None]:
    """Convert exceptions and panics of the library ``tokenizers`` during ``task`` by the file ``path`` to DataError."""
    os.environ["RUST_BACKTRACE"] = "0"  # the backtrace of a panic takes seconds
    try:
        with buffered_stderr():
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"the tokenizer cannot {task} ({problem}); use another one than {path}") from None


class RustTokenizer(Tokenizer):
    """A tokenizer of the library ``tokenizers``."""

    path: str
    """Its file."""
    _encoder: tokenizers.Tokenizer
    """It must not recognize special tokens in texts."""

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        with library_errors(self.path):
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_marked(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """The ids of each text and their character offsets; texts of special tokens are encoded as special tokens."""
        check_texts(texts)
        self._encoder.encode_special_tokens = False
        try:
            with library_errors(self.path):
                return self._encoder.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._encoder.encode_special_tokens = True

    def _decode(self, ids: list[int]) -> str:
        with library_errors(self.path, "decode these tokens"):
            return self._encoder.decode(ids, skip_special_tokens=False)


LONGEST_WORD = 1 << 20
"""Maximum characters of a word or of whitespace, for which a tokenizer needs a hundred times as much memory."""


def check_texts(texts: Iterable[str], where: str = "") -> None:
    """Raises DataError, beginning with ``where``, for a text that no tokenizer can encode.

    These are texts with half of a surrogate pair, which JSON can contain and UTF-8 cannot, and texts with a word or
    whitespace of more than ``LONGEST_WORD`` characters.
    """
    for text in texts:
        runs = (("a word", text.split()), ("space", re.findall(r"\s{2,}", text))) if len(text) > LONGEST_WORD else ()
        for what, parts in runs:
            longest = max(parts, key=len, default="")
            if len(longest) > LONGEST_WORD:
                raise DataError(
                    f"{where}{what} of {len(longest):,} characters begins at character {text.index(longest):,}, more "
                    f"than the {LONGEST_WORD:,} that can be tokenized: remove or divide it"
                )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"U+{ord(text[error.start]):04X}, half of a surrogate pair"
            raise DataError(f"{where}character {error.start} of the text is {what}; remove or replace it") from error


_TRAINED = " (tools/train_tokenizer.py makes one)"


def require_files(kind: str, files: Mapping[str, str | None], origin: str = _TRAINED) -> list[str]:
    """The paths in ``files``, by flag. Raises DataError with a line, ending with ``origin``, for each that is not a
    file."""
    problems = []
    for flag, path in files.items():
        if path is None:
            problems.append(f"{flag} is missing: {kind} needs it{origin}")
        elif not os.path.isfile(path):  # unlike Path.is_file, this raises no error, such as for a name that is too long
            exists = "is no file" if os.path.exists(path) else "no such file"
            problem = "is a folder" if os.path.isdir(path) else exists
            problems.append(f"{flag} {path}: {problem}{origin}")
    if problems:
        raise DataError(problems)
    return [path for path in files.values() if path is not None]


def read_file(path: str) -> bytes:
    """The content of a file. Raises DataError if it cannot be read."""
    try:
        return read_bytes(path, largest=LARGEST_JSON)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_text(path: str) -> str:
    """The text of a UTF-8 file. Raises DataError if it cannot be read."""
    try:
        return read_file(path).decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; is this the right file?") from error


def read_object(path: str) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError if it cannot be read or is not a JSON object."""
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        raise DataError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: a JSON {type(content).__name__}, not an object")
    return content


def read_vocab_json(path: str) -> dict[str, int]:
    """The ids of a ``vocab.json``, token -> id.

    Raises DataError if the file has another content, or if its ids are not 0 to n-1, each once.
    """
    vocabulary = read_object(path)
    check_ids(path, vocabulary)
    return vocabulary


def require_tokens(path: str, vocabulary: Mapping[str, int], required: Iterable[str]) -> None:
    """Raises DataError with a line for each token of ``required`` that ``vocabulary`` lacks."""
    missing = [token for token in required if token not in vocabulary]
    if missing:
        raise DataError(
            f"{path}: the vocabulary lacks {token}; add it with the id {id}"
            for id, token in enumerate(missing, start=len(vocabulary))
        )


def check_ids(path: str, vocabulary: Mapping[str, Any]) -> None:
    """Raises DataError unless the ids are the integers 0 to n-1, each once."""
    # By type, since isinstance(True, int) is true.
    wrong = next((token for token, id in vocabulary.items() if type(id) is not int), None)
    if wrong is not None:
        raise DataError(f"{path}: the id of {wrong!r} is {vocabulary[wrong]!r}; ids are integers")
    absent = set(range(len(vocabulary))) - set(vocabulary.values())
    if absent:
        raise DataError(
            f"{path}: {len(vocabulary)} tokens need the ids 0 to {len(vocabulary) - 1}, each once; "
            f"no token has {min(absent)}"
        )
