"""Rows of a Parquet file, a few at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, DataError

Row = tuple[bytes | None, ...]
"""The requested columns of a row, UTF-8; None for null."""

_ROWS = 16
"""Rows decoded at a time: documents may be long."""


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
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
    # Pages are read as they are needed, not row groups, which may be of any size.
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        _check_columns(path, file.schema_arrow, columns)
        for batch in file.iter_batches(_ROWS, columns=list(columns), use_threads=False):
            yield from zip(*(_cells(batch.column(name)) for name in columns), strict=True)


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


def _cells(column: Any) -> list[bytes | None]:
    """As bytes: UTF-8 is decoded later, when the number of the row is known for messages."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_large = pyarrow.types.is_large_string(column.type)
    return column.cast(pyarrow.large_binary() if is_large else pyarrow.binary()).to_pylist()
