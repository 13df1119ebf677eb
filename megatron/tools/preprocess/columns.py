"""The rows of Parquet and Arrow files, a few at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import LARGEST, LARGEST_LINE, check_regular
from megatron.tools.preprocess.file_lines import MOST_EXPANDED

Row = tuple[bytes | None, ...]
"""The requested columns of a row, UTF-8; None for null."""
_ROWS = 16
"""Rows decoded at a time: documents may be long."""


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
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


def arrow_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of ``columns`` of a file of Arrow's stream or file format, as ``parquet_rows``."""
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
        kind = schema.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f'{path}: column "{name}" holds {kind}, where strings are needed')
