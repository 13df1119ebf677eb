"""The files that an evaluation reads: text, lines of JSONL or Parquet, pairs of texts, indexed data sets.

Also removes the spaces that WikiText has around punctuation. No torch here.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import read_bytes
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.preprocess.corpus import FORMATS, format_of, read_chunks

_CHUNK = 1 << 20


class Line(NamedTuple):
    """One text of a file, with its location for messages."""

    where: str
    text: str


def read_text(path: Path) -> str:
    """The content of a UTF-8 file, line ends unchanged. Raises ConfigError if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a file of text") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; name a file of text") from None


def read_lines(path: Path, key: str) -> list[Line]:
    """The text under ``key`` of each line of a JSONL file, or row of Parquet, without blank lines.

    Raises ConfigError if the file cannot be read, a line is invalid, or there is no text.
    """
    lines = [Line(where, text) for where, texts in _read_rows(path, (key,)) for text in texts]
    if not lines:
        raise ConfigError(f"{path}: no text in it; give a JSON object with {key!r} on each line")
    return lines


PAIR = ("input", "target")
"""Keys of a text and of what is to be written for it."""


def read_pairs(path: Path) -> list[tuple[str, str, str]]:
    """Location, input and target of each line of JSONL, or row of Parquet. Raises ConfigError as ``read_lines``."""
    pairs = [(where, text, target) for where, (text, target) in _read_rows(path, PAIR)]
    if not pairs:
        raise ConfigError(f"{path}: no pair in it; give a JSON object with input and target on each line")
    return pairs


def _read_rows(path: Path, keys: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Location of each line of JSONL, or row of Parquet, and its texts under ``keys``, without blank lines."""
    kind = "parquet" if format_of(path) == "parquet" else "jsonl"
    with data_errors_as_usage():
        return [
            (where, FORMATS[kind].texts(where, line, keys))
            for chunk in read_chunks(path, kind, keys, size=_CHUNK)
            for number, line in enumerate(chunk.lines, chunk.first_line)
            if not isinstance(line, bytes) or line.strip()
            for where in [f"{path}:{number}"]
        ]


def read_tokens(prefix: Path, vocab_size: int) -> np.ndarray:
    """All tokens of the data set ``PREFIX.bin`` and ``PREFIX.idx`` in a row, by memory map: integers [n].

    Raises ConfigError if it is missing or broken, or holds tokens outside a vocabulary of ``vocab_size``.
    """
    with data_errors_as_usage():
        dataset = IndexedDataset(prefix)
    tokens = dataset.span(0, dataset.num_tokens)
    if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size):
        raise ConfigError(
            f"{prefix}.bin: its tokens range from {int(tokens.min())} to {int(tokens.max())}, and the model's "
            f"vocabulary has {vocab_size}; give the data set that was made with the model's tokenizer"
        )
    return tokens


@contextmanager
def data_errors_as_usage() -> Iterator[None]:
    """Turn DataError into ConfigError: a broken file on the command line is wrong usage."""
    try:
        yield
    except DataError as error:
        raise ConfigError(error.messages) from error


_SPACED = (
    ("s '", "s'"),
    # inside words and numbers
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    # after a word
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_ENCLOSED = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
"""Pairs whose inner blanks are removed."""
_REST = (
    # headings
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """``text`` without the blanks that WikiText inserts."""
    for old, new in _SPACED:
        text = text.replace(old, new)
    for opening, closing in _ENCLOSED:
        inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(f"{re.escape(opening)}{inside}{re.escape(closing)}", rf"{opening}\1{closing}", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text


def count_words(text: str) -> int:
    """Words of WikiText's tokenized text, which normalize perplexity: split at blanks only, so line ends count."""
    return len(text.strip().split(" "))
