"""Reads conversations with images from files of several formats.

The formats are LLaVA's JSON, JSONL, tar files of WebDataset (https://github.com/webdataset/webdataset), Parquet with
images as bytes or as the ``datasets`` library's struct of bytes and path, and Megatron-LM's multimodal data sets, whose
images are sequences with a nonzero mode.
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.common.errors import DataError, one_line, reason
from megatron.common.reading import LARGEST, parse_json, read_bytes, regular
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tools.inference.images import IMAGES, images_of
from megatron.tools.preprocess.corpus import open_parquet, parquet_batches
from megatron.tools.preprocess.file_lines import file_lines

_LARGEST_SAMPLE = 1 << 26
"""Maximum bytes of the files of a sample in a tar file, where a sparse file may be far larger than the archive."""
CONVERSATIONS = ("conversations", "messages")


class Record(NamedTuple):
    """A conversation of a file, or an error instead."""

    where: str
    content: Any
    """A JSON object, whose ``image`` or ``images`` are paths, or contents of image files."""
    error: str | None = None
    tokens: list[int] | None = None
    """The text, if it is already tokenized; it follows the images of ``content``."""


def read_records(path: Path) -> Iterator[Record]:
    """The conversations of a file, whose suffix determines the format.

    Raises:
        DataError: the file cannot be read, or is damaged.
        ConfigError: the package that reads this format is missing.
    """
    try:
        yield from READERS.get(path.suffix, _read_lines)(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({one_line(reason(error))})") from None
    except (ValueError, RecursionError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: not a file of conversations ({one_line(str(error))})") from None


def _read_json(path: Path) -> Iterator[Record]:
    records = parse_json(read_bytes(path))
    if not isinstance(records, list):
        raise ValueError("a list of objects is expected")
    return (Record(f"{path}: object {number}", record) for number, record in enumerate(records, start=1))


def _read_lines(path: Path) -> Iterator[Record]:
    for number, line in enumerate(file_lines(path), start=1):
        if line.strip():
            yield _parse(f"{path}:{number}", line, {})


def _parse(where: str, text: bytes, images: Mapping[str, bytes]) -> Record:
    """Parse a JSON object, and insert the contents of the ``images`` that it names, or of all if it names none."""
    try:
        content = parse_json(text)
        names = images_of(content) or [*images]
    except ValueError as error:
        return Record(where, None, f"not JSON ({error})")
    except DataError as error:
        return Record(where, None, str(error))
    if images and isinstance(content, dict):
        content = content | {"image": [images.get(str(name), name) for name in names], "images": None}
    return Record(where, content)


def _read_tar(path: Path) -> Iterator[Record]:
    """Read WebDataset samples: consecutive files whose paths are equal up to the first dot of the file name."""
    with open(path, "rb", opener=regular) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        key, files = "", dict[str, bytes]()
        for member in archive:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            if (member_key := f"{folder}/{name.partition('.')[0]}") != key and files:
                yield _sample(path, key, files)
                files = {}
            key = member_key
            if member.size + sum(map(len, files.values())) > _LARGEST_SAMPLE:
                raise ValueError(f"the sample of {member.name} has more than {_LARGEST_SAMPLE:,} bytes")
            content = archive.extractfile(member)
            assert content is not None, "it is a file"
            files[name] = content.read()
        if files:
            yield _sample(path, key, files)


def _sample(path: Path, key: str, files: dict[str, bytes]) -> Record:
    where = f"{path}: sample {key.removeprefix('/')}"
    texts = [name for name in files if name.endswith(".json")]
    if len(texts) != 1:
        return Record(where, None, f"{len(texts)} files of JSON, and one is expected")
    return _parse(where, files.pop(texts[0]), files)


def _read_parquet(path: Path) -> Iterator[Record]:
    with open_parquet(path) as file:
        columns = [name for name in (*CONVERSATIONS, *IMAGES) if name in file.schema_arrow.names]
        if not {*columns} & {*CONVERSATIONS}:
            raise ValueError(f"it has no column {' or '.join(CONVERSATIONS)}")
        rows = (row for batch in parquet_batches(file, columns, LARGEST) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield Record(f"{path}: row {number}", row)


def _read_indexed(path: Path) -> Iterator[Record]:
    """Read a multimodal data set, whose image sequences are the bytes of image files."""
    data = IndexedDataset(path.with_suffix(""))
    if data.modes is None:
        raise ValueError("it has no modes, so its sequences are all text")
    for document, (first, end) in enumerate(pairwise(data.doc_idx.tolist())):
        images = [_image_bytes(data.get(number)) for number in range(first, end) if data.modes[number]]
        texts = (data.get(number).tolist() for number in range(first, end) if not data.modes[number])
        yield Record(f"{path}: document {document}", {"image": images}, tokens=[*chain.from_iterable(texts)])


def _image_bytes(numbers: np.ndarray) -> bytes:
    """The image file in a sequence. Its first number, if below the item size, is the number of padding bytes."""
    is_padded = len(numbers) > 0 and 0 <= numbers[0] < numbers.itemsize
    content = numbers[int(is_padded) :].tobytes()
    return content[: len(content) - int(numbers[0])] if is_padded else content


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_lines,
    ".tar": _read_tar,
    ".parquet": _read_parquet,
    ".idx": _read_indexed,
}
"""Reader functions by file suffix."""
