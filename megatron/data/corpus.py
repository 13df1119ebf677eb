"""Text to be tokenized: JSONL, or plain text with a document on each line."""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.errors import DataError


class Chunk(NamedTuple):
    """Consecutive lines of a file."""

    path: Path
    first_line: int
    lines: list[bytes]


def read_chunks(path: Path, *, size: int) -> Iterator[Chunk]:
    """Cut a file into chunks of whole lines, of ``size`` bytes or a little more. Raises DataError if unreadable."""
    try:
        with open(path, "rb") as file:
            first_line, lines, held = 1, [], 0
            for line in file:
                lines.append(line)
                held += len(line)
                if held >= size:
                    yield Chunk(path, first_line, lines)
                    first_line, lines, held = first_line + len(lines), [], 0
            if lines:
                yield Chunk(path, first_line, lines)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_texts(where: str, line: bytes, input_format: str, keys: Sequence[str]) -> list[str]:
    """The text of each key on a line of an input; none on a blank line.

    Args:
        where: file and line, for messages.
        input_format: one of ``FORMATS``.
        keys: what to read of a JSON object. Plain text is the same under every key.

    Raises:
        DataError: the line is not UTF-8, not of its format, or lacks a key.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} of the line is not UTF-8") from error
    # A byte order mark is no part of the text, nor is the end of the line.
    text = text.removeprefix(codecs.BOM_UTF8.decode()).rstrip("\r\n")
    return FORMATS[input_format](where, text, keys) if text.strip() else []


def _json_texts(where: str, line: str, keys: Sequence[str]) -> list[str]:
    """The values under ``keys`` of the JSON object ``line``."""
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}, at column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{where}: a JSON {_kind(document)}, where an object is needed")
    for key in keys:
        if key not in document:
            raise DataError(f'{where}: no key "{key}" (choose keys with --json-keys)')
        if not isinstance(document[key], str):
            raise DataError(f'{where}: "{key}" is a {_kind(document[key])}, where a string is needed')
        try:
            document[key].encode("utf-8")
        except UnicodeEncodeError as error:
            # JSON can spell what is no Unicode text.
            raise DataError(f'{where}: "{key}" holds half of a surrogate pair (\\ud800 to \\udfff)') from error
    return [document[key] for key in keys]


def _kind(value: object) -> str:
    """What JSON calls a value that is not what it should be."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _plain_texts(where: str, line: str, keys: Sequence[str]) -> list[str]:
    """The line itself, under every key."""
    return [line] * len(keys)


FORMATS: dict[str, Callable[[str, str, Sequence[str]], list[str]]] = {"jsonl": _json_texts, "text": _plain_texts}
"""Kinds of input, and what reads a line of each."""


def input_format(path: Path) -> str:
    """The format that a file's name tells: text for ``.txt``, else JSONL."""
    return "text" if path.suffix == ".txt" else "jsonl"
