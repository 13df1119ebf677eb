"""The images of a data set of conversations: two NumPy files next to ``PREFIX.bin`` and ``PREFIX.idx``.

``PREFIX_images.npy`` holds the pixels of all images, in the order of the conversations, uint8 [n, height, width, 3];
``PREFIX_image_starts.npy`` how many of them are before each document, and their number, int64 [documents + 1].
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from megatron.common.errors import DataError
from megatron.common.files import replace_file


class ImageStore:
    """Read access, by memory map.

    Attributes:
        pixels: uint8 [n, height, width, 3].
        starts: int64 [documents + 1].

    Raises:
        DataError: a file is missing, unreadable, damaged, or does not fit the other one or ``documents``.
    """

    def __init__(self, prefix: str, documents: int) -> None:
        pixels, starts = _paths(prefix)
        self.pixels, self.starts = _read(pixels, np.uint8, 4), _read(starts, np.int64, 1)
        if self.pixels.shape[3] != 3:
            raise DataError(f"{pixels}: images have {self.pixels.shape[3]} colors, and should have 3")
        if len(self.starts) != documents + 1:
            raise DataError(f"{starts} is of {len(self.starts) - 1} documents, and {prefix}.idx of {documents}")
        if self.starts[0] != 0 or (np.diff(self.starts) < 0).any() or self.starts[-1] != len(self.pixels):
            raise DataError(f"{starts} does not fit the {len(self.pixels)} images of {pixels}: make both again")


def _paths(prefix: str) -> tuple[Path, Path]:
    return Path(f"{prefix}_images.npy"), Path(f"{prefix}_image_starts.npy")


def _read(path: Path, dtype: type[np.integer], dimensions: int) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "it is truncated"
        raise DataError(f"{path}: cannot read the images of a data set ({reason})") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error})") from None
    if array.dtype != dtype or array.ndim != dimensions:
        raise DataError(f"{path} holds {array.dtype} {list(array.shape)}, which are not images of a data set")
    return array


@contextmanager
def image_writer(prefix: str, size: int) -> Iterator[Callable[[Sequence[np.ndarray]], None]]:
    """``add(images)`` for each document in turn, its images uint8 [size, size, 3]; in little memory.

    The files get their names when the block ends without an exception.
    """
    pixels, starts = _paths(prefix)
    counts = [0]
    with replace_file(pixels) as file:
        _write_header(file, 0, size)
        begin = file.tell()

        def add(images: Sequence[np.ndarray]) -> None:
            counts.append(counts[-1] + len(images))
            for image in images:
                assert image.shape == (size, size, 3) and image.dtype == np.uint8
                file.write(image.tobytes())

        yield add
        file.seek(0)
        _write_header(file, counts[-1], size)
        assert file.tell() == begin, "NumPy leaves room for a larger number of images"
    with replace_file(starts) as file:
        np.save(file, np.array(counts, np.int64))


def _write_header(file: IO[bytes], images: int, size: int) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (images, size, size, 3)}
    np.lib.format.write_array_header_1_0(file, header)
