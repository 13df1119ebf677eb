"""Tables of labeled text: the files of GLUE (Wang et al., 2018), and other tab-separated files. No torch here.

Each line is a row, columns are separated by tabs, without quoting. A row has one text or a pair of texts, and a label.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from megatron.common.errors import DataError, counted, did_you_mean
from megatron.common.reading import read_bytes, read_lines, regular


@dataclass(frozen=True)
class Format:
    """The columns of texts and labels in a table. A column is a name in the header, or a number, counted from 1."""

    texts: tuple[str, ...]
    """One column, or two for a pair."""
    label: str
    labels: tuple[str, ...] = ()
    """All labels, in the order of the classes; by default the sorted labels of the training rows."""
    has_header: bool = True
    skips_broken_rows: bool = False
    """Whether to skip rows with a wrong number of columns, which some published files contain."""


GLUE = {
    "COLA": Format(("4",), "2", ("0", "1"), has_header=False),
    "MNLI": Format(("sentence1", "sentence2"), "gold_label", ("contradiction", "entailment", "neutral")),
    "MRPC": Format(("#1 String", "#2 String"), "Quality", ("0", "1")),
    "QNLI": Format(("question", "sentence"), "label", ("entailment", "not_entailment")),
    "QQP": Format(("question1", "question2"), "is_duplicate", ("0", "1"), skips_broken_rows=True),
    "RTE": Format(("sentence1", "sentence2"), "label", ("entailment", "not_entailment")),
    "SST-2": Format(("sentence",), "label", ("0", "1")),
    "WNLI": Format(("sentence1", "sentence2"), "label", ("0", "1")),
}
"""The classification tasks of GLUE, with the same order of classes as Megatron-LM."""


class Row(NamedTuple):
    """A row of a table."""

    texts: tuple[str, ...]
    label: str
    line: int
    """Line number in the file, counted from 1."""


@dataclass(frozen=True)
class Table:
    """The rows of a file."""

    path: Path
    rows: Sequence[Row]
    skipped: int
    """Number of skipped rows, with a wrong number of columns or an empty text."""

    def check_labels(self, labels: Sequence[str]) -> None:
        """Raise DataError with the first row whose label is not in ``labels``."""
        known = set(labels)
        for row in self.rows:
            if row.label not in known:
                otherwise = f"labels are {', '.join(labels[:8])}{' ...' if len(labels) > 8 else ''}"
                raise DataError(
                    f"{self.path}:{row.line}: the label {row.label[:40]!r} is unknown: "
                    f"{did_you_mean(row.label, labels, otherwise=otherwise)}"
                )


def read_table(path: Path, form: Format) -> Table:
    """Read the rows of ``path``.

    Raises DataError with file and line if it cannot be read, a column is missing or a text is empty.
    """
    lines = _lines(path)
    header: list[str] | None = None
    if form.has_header:
        first = next(lines, None)
        if first is None:
            raise DataError(f"{path}: the file is empty; a table has a header and a row on each line")
        header = first[1].split("\t")
    rows: list[Row] = []
    skipped, width, indices = 0, 0, tuple[int, ...]()
    for number, line in lines:
        columns = line.split("\t")
        if not width:
            width = len(header or columns)
            indices = tuple(_column_index(column, header, width, path) for column in (*form.texts, form.label))
            if indices[-1] in indices[:-1]:
                column = form.texts[indices.index(indices[-1])]
                raise DataError(f"{path}:1: the text and the label are one column, {column}: give --text-columns")
        if len(columns) != width:
            if form.skips_broken_rows:
                skipped += 1
                continue
            raise DataError(
                f"{path}:{number}: {counted(len(columns), 'column')}, where "
                f"{'the header' if header else 'the first row'} has {width}; columns are separated by tabs"
            )
        *texts, label = (columns[index].strip() for index in indices)
        if all(texts):
            rows.append(Row(tuple(texts), label, number))
        elif form.skips_broken_rows:
            skipped += 1
        else:
            empty = form.texts[texts.index("")]
            raise DataError(f"{path}:{number}: the column {empty} is empty; remove the row, or fill it in")
    if not rows:
        raise DataError(f"{path}: no row; a table has one on each line{' after the header' if header else ''}")
    return Table(path, rows, skipped)


def labels_of(tables: Iterable[Table]) -> tuple[str, ...]:
    """All labels of ``tables``, sorted; numerically if all are numbers."""
    labels = {row.label for table in tables for row in table.rows}
    are_numbers = all(label.isdecimal() and len(label) < 20 for label in labels)
    return tuple(sorted(labels, key=int if are_numbers else None))


def content_hash(paths: Iterable[Path]) -> str:
    """A hash of the contents of ``paths``, in their order."""
    digest = sha256()
    for path in paths:
        digest.update(sha256(read_bytes(path)).digest())
    return digest.hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each non-blank line of ``path``."""
    number = 0
    try:
        with open(path, "rb", opener=regular) as file:
            for number, line in enumerate(read_lines(file), 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}:{number}: not UTF-8; save the table in that encoding") from None
    except ValueError as error:
        raise DataError(f"{path}: {error} after line {number}") from None


def _column_index(column: str, header: Sequence[str] | None, width: int, path: Path) -> int:
    """The index of ``column`` in a row."""
    if header is not None and column in header:
        if header.count(column) > 1:
            raise DataError(f"{path}:1: {header.count(column)} columns are named {column}: rename all but one")
        return header.index(column)
    if column.isascii() and column.isdecimal() and len(column) < 10 and 1 <= int(column) <= width:
        return int(column) - 1
    if column.isdecimal() or header is None:
        raise DataError(f"{path}:1: there is no column {column}, but {counted(width, 'column')}, counted from 1")
    advice = did_you_mean(column, header, otherwise=f"the header has {', '.join(header[:12])}")
    raise DataError(f"{path}:1: there is no column {column}: {advice}")
