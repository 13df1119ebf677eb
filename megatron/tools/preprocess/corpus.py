"""Text to be tokenized: JSONL, plain text with a document on each line, or Parquet with one in each row.

Lines may be compressed with gzip, bzip2 or Zstandard. A few are read at a time.
"""

import argparse
import bz2
import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import LARGEST, LARGEST_LINE, check_regular, read_json, read_lines, regular_or_pipe

Row = tuple[bytes | None, ...]
"""The requested columns of a row of Parquet, UTF-8; None for null."""
Line = bytes | Row


class Chunk(NamedTuple):
    """Consecutive lines of a file, or rows."""

    path: Path
    first_line: int
    lines: list[Line]
    size: int
    """Bytes of text."""
    position: tuple[int, int] = (0, 0)
    """Files before its own, and chunks of its own up to its end."""


class Format(NamedTuple):
    """A kind of input."""

    lines: Callable[[Path, Sequence[str]], Iterator[Line]]
    """Reads the lines of a file, as far as the keys need them."""
    texts: Callable[[str, Any, Sequence[str]], list[str]]
    """Returns the text of each key of a line. Raises DataError beginning with its first argument, the location."""
    allows_blank_lines: bool = False
    """Whether lines without text are no error."""


def read_chunks(path: Path, kind: str, keys: Sequence[str], *, size: int) -> Iterator[Chunk]:
    """Cut a file of one of ``FORMATS`` into chunks of complete lines, of ``size`` bytes or a little more.

    Raises:
        DataError: the file cannot be read, or is damaged.
        ConfigError: a package to read it is missing.
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
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise DataError(f"cannot read {path}{after}: {reason}") from error


_BLOCK = 1 << 12
"""Compressed bytes taken at a time: what they hold may be very much more."""
_MOST_EXPANDED = 500
"""Times that a compressed file of text may expand; further lines of one that is larger than this are not read."""
_LARGEST_WINDOW = 1 << 31
"""As ``zstd --long=31`` writes it."""


class _ZstandardFrames(io.RawIOBase):
    """The content of consecutive frames. The package's own reader takes a truncated file for a complete one."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises ConfigError if the package is missing."""
        try:
            import zstandard
        except ImportError:
            raise ConfigError(f"{file.name} is compressed by Zstandard: pip install zstandard to read it") from None
        self._file, self._library = file, zstandard
        self._frame: Any = None
        self._compressed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (compressed := self._compressed or self._file.read(_BLOCK)):
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            try:
                self._ready, self._compressed = memoryview(self._frame.decompress(compressed)), b""
            except self._library.ZstdError as error:
                raise ValueError(str(error)) from error
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        if not self._ready and self._frame is not None:
            raise EOFError("it ends in the middle of a Zstandard frame")
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def close(self) -> None:
        self._file.close()
        super().close()


_OPENERS: dict[bytes, Callable[[BinaryIO], io.BufferedIOBase]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    b"\x28\xb5\x2f\xfd": lambda file: io.BufferedReader(_ZstandardFrames(file), 1 << 16),
    # Of bzip2 also the beginning of its first block: a text may well begin with "BZh".
    **{b"BZh%d1AY&SY" % level: lambda file: bz2.BZ2File(file) for level in range(1, 10)},
}
"""How compressed files are opened, by their first bytes."""


def _file_lines(path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """The lines of a file, decompressed. Raises ValueError, EOFError or OSError if it is damaged or truncated."""
    file = open(path, "rb", opener=regular_or_pipe)
    start = file.peek(10)
    opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
    is_counted = opener is not None and path.is_file()
    total, most = 0, max(LARGEST, _MOST_EXPANDED * os.fstat(file.fileno()).st_size)
    with opener(file) if opener else file as lines:
        for line in read_lines(lines):
            total += len(line)
            if is_counted and total > most:
                raise ValueError(f"it expands to more than {_MOST_EXPANDED} times its size")
            yield line


def _json_texts(where: str, line: bytes, keys: Sequence[str]) -> list[str]:
    """The values under ``keys`` of the JSON object ``line``, all empty on a blank line."""
    document = json_object(where, line)
    if document is None:
        return [""] * len(keys)
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


def json_object(where: str, line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, None of a blank one. Raises DataError beginning with ``where`` for anything else."""
    text = _of_line(where, line)
    if not text.strip():
        return None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}, at column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{where}: a JSON {_kind(document)}, where an object is needed")
    return document


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _plain_texts(where: str, line: bytes, keys: Sequence[str]) -> list[str]:
    """The line itself, under every key."""
    text = _of_line(where, line)
    return [text if text.strip() else ""] * len(keys)


_ROWS = 16
"""Rows decoded at a time: documents may be long."""


def _read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of ``columns``, in order.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: a column is missing, or holds no strings.
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path} is a Parquet file: pip install pyarrow to read it") from None
    check_regular(path)
    # Pages are read as they are needed, not row groups, which may be of any size.
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        _check_columns(path, file.schema_arrow, columns)
        rows = max(1, min(_ROWS, LARGEST_LINE // largest_part(file.metadata)))
        for batch in file.iter_batches(rows, columns=list(columns), use_threads=False):
            # As bytes: UTF-8 is decoded later, when the number of the row is known for messages.
            cells = (batch.column(name).cast(pyarrow.large_binary()).to_pylist() for name in columns)
            for row in zip(*cells, strict=True):
                if sum(len(cell or b"") for cell in row) > LARGEST_LINE:
                    raise ValueError(f"a row of more than {LARGEST_LINE:,} bytes")
                yield row


def _read_arrow(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of ``columns`` of a file of Arrow's stream or file format, as ``_read_rows``."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise ConfigError(f"{path} is an Arrow file: pip install pyarrow to read it") from None
    check_regular(path)
    with pyarrow.memory_map(str(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        with pyarrow.ipc.open_stream(file) if is_stream else pyarrow.ipc.open_file(file) as reader:
            _check_columns(path, reader.schema, columns)
            batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            for batch in batches:
                batch.validate(full=True)
                for start in range(0, batch.num_rows, _ROWS):
                    part = batch.select(list(columns)).slice(start, _ROWS)
                    cells = (column.cast(pyarrow.large_binary()).to_pylist() for column in part.columns)
                    yield from zip(*cells, strict=True)


def largest_part(metadata: Any) -> int:
    """Bytes that a column of a row group has: a dictionary's value may be as long, and be repeated in all rows.

    Raises ValueError for one that expands more than any text.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    parts = [group.column(number) for group in groups for number in range(group.num_columns)]
    if any(part.total_uncompressed_size > max(LARGEST, _MOST_EXPANDED * part.total_compressed_size) for part in parts):
        raise ValueError(f"a column expands to more than {_MOST_EXPANDED} times its size")
    return max((part.total_uncompressed_size for part in parts), default=0) + 1


def _check_columns(path: Path, schema: Any, columns: Sequence[str]) -> None:
    import pyarrow

    for name in columns:
        if name not in schema.names:
            raise DataError(
                f'{path}: no column "{name}" (choose columns with --json-keys; there are {", ".join(schema.names)})'
            )
        kind = schema.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f'{path}: column "{name}" holds {kind}, where strings are needed')


def _whole_file(path: Path, keys: Sequence[str]) -> Iterator[bytes]:
    """All of a file, decompressed, as one line."""
    text, size = [], 0
    for line in _file_lines(path, keys):
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
        texts.append(_decoded(where, cell))
    return texts


def _of_line(where: str, line: bytes) -> str:
    """The text of a line, without byte order mark and line end."""
    return _decoded(where, line).removeprefix(codecs.BOM_UTF8.decode()).rstrip("\r\n")


def _decoded(where: str, text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} of the line is not UTF-8") from error


def line_texts(path: Path, kind: str | None, number: int, line: Line, keys: Sequence[str]) -> list[str]:
    """The text of each key of line ``number`` of a file of one of ``FORMATS``, by default the format of its name.

    Raises DataError for a line that has none. If the file may be plain text, the message also names the flag for that.
    """
    try:
        return FORMATS[kind or format_of(path)].texts(f"{path}:{number}", line, keys)
    except DataError as error:
        is_named = kind is not None or uncompressed(path).suffix in _FORMATS_BY_ENDING
        if is_named or not isinstance(line, bytes) or line.lstrip().startswith(b"{"):
            raise
        raise DataError(
            f"{error}; if {path.name} is plain text, one document per line, add --input-format text, and for a "
            "vocabulary of whole words --tokenizer-type WhitespaceTokenizer"
        ) from None


FORMATS: dict[str, Format] = {
    "jsonl": Format(_file_lines, _json_texts),
    "text": Format(_file_lines, _plain_texts, allows_blank_lines=True),
    "parquet": Format(_read_rows, _row_texts),
    "arrow": Format(_read_arrow, _row_texts),
    "document": Format(_whole_file, _plain_texts),
}
"""Kinds of input, by name."""

_FORMATS_BY_ENDING = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSED = (".gz", ".bz2", ".zst")


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name files of text, their format, and the keys to read."""
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSONL, plain text (one document per line), Parquet or Arrow; also patterns such as 'data/*.jsonl', "
        "folders, of which all such files are read, and folders that save_to_disk of datasets wrote",
    )
    add(
        "--input-format",
        choices=tuple(FORMATS),
        help="format of all inputs (default: by name or content)",
    )
    add(
        "--document-per-file",
        dest="input_format",
        action="store_const",
        const="document",
        help="each file is one document of plain text",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of JSON objects, or columns, to read")


def expand_inputs(paths: Sequence[Path], kind: str | None) -> list[Path]:
    """The files of ``--input``: those of a folder, of a saved data set, or that match a pattern, by name.

    Raises DataError with a line for each path that is no file and has none.
    """
    files = {path: _files_of(path, kind) for path in paths}
    if missing := [path for path in paths if not files[path]]:
        reasons = {path: "no file of text in this folder" if path.is_dir() else "no such file" for path in missing}
        raise DataError([f"--input {path}: {reason}" for path, reason in reasons.items()])
    return [file for path in paths for file in files[path]]


_STATE = "state.json"
"""Names the files of a data set that ``save_to_disk`` wrote, in order."""


def _files_of(path: Path, kind: str | None) -> list[Path]:
    if not path.is_dir():
        return (
            [path]
            if path.exists()
            else sorted(file for file in map(Path, glob(str(path), recursive=True)) if file.is_file())
        )
    if (path / _STATE).is_file():
        try:
            return [path / Path(part["filename"]).name for part in read_json(path / _STATE)["_data_files"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path / _STATE} is not of save_to_disk: no list of _data_files") from error
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    names = {*_FORMATS_BY_ENDING} if kind is None else None
    of_text = (file for file in files if names is None or uncompressed(file).suffix in names)
    return sorted(file for file in of_text if file.name not in (_STATE, "dataset_info.json"))


def format_of(path: Path) -> str:
    """The format by a file's name, regardless of its compression, or for another name by its first character."""
    return _FORMATS_BY_ENDING.get(uncompressed(path).suffix) or _format_of_content(path)


@cache
def _format_of_content(path: Path) -> str:
    """JSONL, or text if a file begins with anything but JSON; JSONL, too, of a pipe, which cannot be read twice."""
    if not path.is_file():
        return "jsonl"
    try:
        start = next(filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in _file_lines(path, ()))), b"")
    except (OSError, EOFError, ValueError, zlib.error):  # reading it will say so
        return "jsonl"
    return "jsonl" if start.startswith((b"{", b"[")) else "text"


def uncompressed(path: Path) -> Path:
    """The name of a file without the ending of its compression."""
    return path.with_suffix("") if path.suffix in _COMPRESSED else path


def text_size(paths: Sequence[Path], kind: str | None) -> int | None:
    """Bytes of text of files of a format (None: by the name); None if one is compressed or a pipe."""
    plain = all(
        (kind or format_of(path)) not in ("parquet", "arrow") and path.suffix not in _COMPRESSED for path in paths
    )
    return sum(path.stat().st_size for path in paths) or None if plain else None
