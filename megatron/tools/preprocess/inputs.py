"""The files that ``--input`` names, and flags of their format."""

import argparse
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from megatron.common.errors import DataError
from megatron.common.reading import read_json
from megatron.tools.preprocess.corpus import FORMATS
from megatron.tools.preprocess.file_lines import COMPRESSED, FORMATS_BY_ENDING, format_of, uncompressed
from megatron.tools.preprocess.image_records import READERS

IMAGES = "images"
"""The kind of conversations with images, of any format that ``image_records`` reads."""


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
            files = [path / Path(part["filename"]).name for part in read_json(path / _STATE)["_data_files"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path / _STATE} is not of save_to_disk: no list of _data_files") from error
        if missing := [file.name for file in files if not file.exists()]:
            raise DataError(f"{path / _STATE} names {missing[0]}, and there is no such file")
        return files
    found = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    names = {None: tuple(FORMATS_BY_ENDING), IMAGES: tuple(READERS)}.get(kind)
    of_text = (file for file in found if names is None or uncompressed(file).suffix in names)
    return sorted(file for file in of_text if file.name not in (_STATE, "dataset_info.json"))


def text_size(paths: Sequence[Path], kind: str | None) -> int | None:
    """Bytes of text of files of a format (None: by the name); None if one is compressed or a pipe."""
    plain = all(
        (kind or format_of(path)) not in ("parquet", "arrow", IMAGES) and path.suffix not in COMPRESSED
        for path in paths
    )
    return sum(path.stat().st_size for path in paths) or None if plain else None
