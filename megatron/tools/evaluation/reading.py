"""The files that a model is tried on, read with all that can be wrong about them. No torch here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config.errors import ConfigError, DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.preprocess.corpus import FORMATS, format_of, read_chunks

_CHUNK = 1 << 20


class Line(NamedTuple):
    """One text of a file of many, and where it stands."""

    where: str
    text: str


def read_text(path: Path) -> str:
    """All of a UTF-8 file, its ends of lines as they are. Raises ConfigError where it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a file of text") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; name a file of text") from None


def read_lines(path: Path, key: str) -> list[Line]:
    """The text under ``key`` of each line of a JSONL file, or row of Parquet; blank lines are left out.

    Raises ConfigError where the file cannot be read, with the number of a line that is wrong, and where none is left.
    """
    kind = "parquet" if format_of(path) == "parquet" else "jsonl"
    with refused_as_usage():
        lines = [
            Line(where, text)
            for chunk in read_chunks(path, kind, (key,), size=_CHUNK)
            for number, line in enumerate(chunk.lines, chunk.first_line)
            if not isinstance(line, bytes) or line.strip()
            for where in [f"{path}:{number}"]
            for text in FORMATS[kind].texts(where, line, (key,))
        ]
    if not lines:
        raise ConfigError(f"{path}: no text in it; give a JSON object with {key!r} on each line")
    return lines


def read_tokens(prefix: Path, vocab_size: int) -> np.ndarray:
    """All tokens of the data set ``PREFIX.bin`` and ``PREFIX.idx`` in a row, by memory map: integers [n].

    Raises ConfigError where it is missing or broken, or holds tokens that a vocabulary of ``vocab_size`` has not.
    """
    with refused_as_usage():
        dataset = IndexedDataset(prefix)
    tokens = dataset.span(0, dataset.num_tokens)
    if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab_size):
        raise ConfigError(
            f"{prefix}.bin: its tokens go from {int(tokens.min())} to {int(tokens.max())}, and the model's vocabulary "
            f"has {vocab_size}; give the data set that was made with the model's tokenizer"
        )
    return tokens


@contextmanager
def refused_as_usage() -> Iterator[None]:
    """What is wrong with a file that the command line names is wrong usage."""
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
    # behind a word
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_ENCLOSED = ("()", "[]", "{}", '""', "''")
"""Pairs that lose the blanks on their inside."""
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
    """``text`` without the blanks that WikiText put there."""
    for old, new in _SPACED:
        text = text.replace(old, new)
    for opening, closing in _ENCLOSED:
        inside = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(f"{re.escape(opening)}{inside}{re.escape(closing)}", rf"{opening}\1{closing}", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text


def count_words(text: str) -> int:
    """Words of WikiText's own text, by which perplexity is normalised: what blanks part, ends of lines among them."""
    return len(text.strip().split(" "))
