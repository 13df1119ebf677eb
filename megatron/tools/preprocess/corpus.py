"""Reads documents to tokenize: JSONL or plain text with one per line, Parquet or Arrow with one per row.

Text files may be compressed with gzip, bzip2 or Zstandard. A few lines or rows are in memory at a time.
"""

import codecs
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megatron.common.errors import ConfigError, DataError, reason
from megatron.common.reading import LARGEST, LARGEST_JSON, LARGEST_LINE, check_regular, parse_json, regular
from megatron.tools.preprocess.arrow_messages import expanded_size
from megatron.tools.preprocess.file_lines import FORMATS_BY_ENDING, MOST_EXPANDED, file_lines, format_of, uncompressed

Row = tuple[bytes | None, ...]
"""The requested columns of a row, in UTF-8; None for null."""
_ROWS = 16
"""Rows decoded at a time: documents may be long."""


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a Parquet file, with the given ``columns``, in order.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: a column is missing or is not of strings.
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    with open_parquet(path) as file:
        _check_columns(path, file.schema_arrow, columns)
        size, most = 0, max(LARGEST, MOST_EXPANDED * path.stat().st_size)
        for batch in parquet_batches(file, columns, LARGEST_LINE):
            if (size := size + batch.nbytes) > most:
                raise ValueError(f"it expands to more than {MOST_EXPANDED} times its size")
            for row in _cells(batch, columns):
                if sum(len(cell or b"") for cell in row) > LARGEST_LINE:
                    raise ValueError(f"a row of more than {LARGEST_LINE:,} bytes")
                yield row


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file. Raises ConfigError without pyarrow, OSError or ValueError if it cannot be read."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path} is a Parquet file: pip install pyarrow to read it") from None
    _check_end(path)
    # Read page by page: row groups may have any size.
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        yield file


def _check_end(path: Path) -> None:
    """Raises ValueError if the description at the end of a Parquet file is too large; OSError as ``regular``."""
    with open(path, "rb", opener=regular) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 8))
        size = int.from_bytes(file.read(4), "little")
        if file.read(4) in (b"PAR1", b"PARE") and size > LARGEST_JSON:
            raise ValueError(f"its description has {size:,} bytes, more than {LARGEST_JSON:,}")


def parquet_batches(file: Any, columns: Sequence[str], most: int) -> Iterator[Any]:
    """Record batches of a few rows with the given ``columns``, each of about ``most`` bytes at most."""
    rows = max(1, min(_ROWS, most // _largest_column_chunk(file.metadata)))
    return file.iter_batches(rows, columns=list(columns), use_threads=False)


def _cells(batch: Any, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a batch as bytes; UTF-8 is decoded later, when messages can tell the row number."""
    import pyarrow

    return zip(*(batch.column(name).cast(pyarrow.large_binary()).to_pylist() for name in columns), strict=True)


def arrow_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a file in Arrow's stream or file format, with the given ``columns``. Raises as ``parquet_rows``."""
    try:
        import pyarrow.ipc
    except ImportError:
        raise ConfigError(f"{path} is an Arrow file: pip install pyarrow to read it") from None
    check_regular(path)
    with pyarrow.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        expected = pyarrow.ipc.open_file(file).num_record_batches if is_file else None
        file.seek(begin := 8 if is_file else 0)  # after which a file holds a stream
        if expanded_size(file) > max(LARGEST, MOST_EXPANDED * file.size()):
            raise ValueError(f"it expands to more than {MOST_EXPANDED} times its size")
        file.seek(begin)
        with pyarrow.ipc.open_stream(file) as reader:
            _check_columns(path, reader.schema, columns)
            number = 0
            for batch in reader:
                number += 1
                batch.validate(full=True)
                for start in range(0, batch.num_rows, _ROWS):
                    yield from _cells(batch.slice(start, _ROWS), columns)
        if expected not in (None, number):
            raise ValueError(f"batches: it holds {number:,}, and lists {expected:,}")


def _largest_column_chunk(metadata: Any) -> int:
    """Bytes of the largest column of a row group: an upper bound for a row, even with dictionary encoding.

    Raises ValueError if a column expands to far more than its compressed size.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    parts = [group.column(number) for group in groups for number in range(group.num_columns)]
    if any(part.total_uncompressed_size > max(LARGEST, MOST_EXPANDED * part.total_compressed_size) for part in parts):
        raise ValueError(f"a column expands to more than {MOST_EXPANDED} times its size")
    return max((part.total_uncompressed_size for part in parts), default=0) + 1


def _check_columns(path: Path, schema: Any, columns: Sequence[str]) -> None:
    import pyarrow

    for name in columns:
        if name not in schema.names:
            raise DataError(
                f'{path}: no column "{name}" (choose columns with --json-keys; there are {", ".join(schema.names)})'
            )
        if schema.names.count(name) > 1:
            raise DataError(f'{path}: {schema.names.count(name)} columns are named "{name}": rename all but one')
        kind = schema.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view"):
            raise DataError(f'{path}: column "{name}" holds {kind}, where strings are needed')


Line = bytes | Row


class Chunk(NamedTuple):
    """Consecutive lines of a file, rows, or conversations with images."""

    path: Path
    first_line: int
    lines: list[Any]
    """Each a ``Line`` or a ``Record``."""
    size: int
    """Bytes of text."""
    position: tuple[int, int] = (0, 0)
    """Number of files before this one, and of chunks in this file up to and including this chunk."""


class Format(NamedTuple):
    """Reader functions of an input format."""

    lines: Callable[[Path, Sequence[str]], Iterator[Line]]
    """Reads the lines or rows of a file, with the columns for the given keys."""
    texts: Callable[[str, Any, Sequence[str]], list[str]]
    """Returns the text of each key of a line. Raises DataError that begins with the first argument, the location."""
    allows_blank_lines: bool = False
    """Whether lines without text are allowed."""


def read_chunks(path: Path, kind: str, keys: Sequence[str], *, size: int) -> Iterator[Chunk]:
    """Cut a file of one of ``FORMATS`` into chunks of complete lines with at least ``size`` bytes.

    Raises:
        DataError: the file cannot be read, or is damaged.
        ConfigError: the package that reads this format is missing.
    """
    first_line, text_bytes = 1, 0
    lines: list[Line] = []
    try:
        for line in FORMATS[kind].lines(path, keys):
            lines.append(line)
            text_bytes += len(line) if isinstance(line, bytes) else sum(len(cell or b"") for cell in line)
            if text_bytes >= size:
                yield Chunk(path, first_line, lines, text_bytes)
                first_line, lines, text_bytes = first_line + len(lines), [], 0
        if lines:
            yield Chunk(path, first_line, lines, text_bytes)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        after = f" after line {first_line + len(lines) - 1}" if first_line + len(lines) > 1 else ""
        raise DataError(f"cannot read {path}{after}: {reason(error)}") from error


def _file_lines(path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    return file_lines(path)


def _json_texts(where: str, line: bytes, keys: Sequence[str]) -> list[str]:
    """The values of ``keys`` in the JSON object ``line``; empty strings for a blank line."""
    document = json_object(where, line)
    if document is None:
        return [""] * len(keys)
    for key in keys:
        if key not in document:
            raise DataError(f'{where}: no key "{key}" (choose keys with --json-keys)')
        if not isinstance(document[key], str):
            raise DataError(f'{where}: "{key}" is a {_json_type(document[key])}, where a string is needed')
    return [document[key] for key in keys]


def json_object(where: str, line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, None for a blank line. Raises DataError that begins with ``where`` for other lines."""
    text = _decode_line(where, line)
    if not text.strip():
        return None
    try:
        document = parse_json(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}, at column {error.colno}") from error
    except ValueError as error:
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{where}: a JSON {_json_type(document)}, where an object is needed")
    return document


def _json_type(value: object) -> str:
    """The JSON name of a value's type."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _plain_texts(where: str, line: bytes, keys: Sequence[str]) -> list[str]:
    """The line itself as text of each key."""
    if 3 * line.count(0) > len(line):
        raise DataError(
            f"{where}: {line.count(0):,} of its {len(line):,} bytes are 0: is the file in UTF-16, or damaged?"
        )
    text = _decode_line(where, line)
    return [text if text.strip() else ""] * len(keys)


def _file_as_line(path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """The entire file, decompressed, as a single line."""
    text, size = [], 0
    for line in file_lines(path):
        text.append(line)
        size += len(line)
        if size > LARGEST_LINE:
            raise ValueError(f"a document of more than {LARGEST_LINE:,} bytes")
    yield b"".join(text)


def _row_texts(where: str, row: Row, keys: Sequence[str]) -> list[str]:
    texts = []
    for key, cell in zip(keys, row, strict=True):
        if cell is None:
            raise DataError(f'{where}: "{key}" is a null, where a string is needed')
        texts.append(_decode(where, cell))
    return texts


def _decode_line(where: str, line: bytes) -> str:
    """The text of a line, without byte order mark and line ending."""
    return _decode(where, line).removeprefix(codecs.BOM_UTF8.decode()).rstrip("\r\n")


def _decode(where: str, text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} of the line is not UTF-8") from error


def line_texts(path: Path, kind: str | None, number: int, line: Line, keys: Sequence[str]) -> list[str]:
    """The text of each key in line ``number`` of a file of one of ``FORMATS``, by default as ``format_of`` the file.

    Raises DataError for a malformed line. If the file may be plain text, the message also names the flag for it.
    """
    try:
        return FORMATS[kind or format_of(path)].texts(f"{path}:{number}", line, keys)
    except DataError as error:
        is_named = kind is not None or uncompressed(path).suffix in FORMATS_BY_ENDING
        if is_named or not isinstance(line, bytes) or line.lstrip().startswith(b"{"):
            raise
        raise DataError(
            f"{error}; if {path.name} is plain text, one document per line, add --input-format text, and for a "
            "vocabulary of whole words --tokenizer-type WhitespaceTokenizer"
        ) from None


FORMATS: dict[str, Format] = {
    "jsonl": Format(_file_lines, _json_texts),
    "text": Format(_file_lines, _plain_texts, allows_blank_lines=True),
    "parquet": Format(parquet_rows, _row_texts),
    "arrow": Format(arrow_rows, _row_texts),
    "document": Format(_file_as_line, _plain_texts),
}
"""Input formats by name."""
