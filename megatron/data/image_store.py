"""The images of a data set of conversations: two NumPy files next to ``PREFIX.bin`` and ``PREFIX.idx``.

``PREFIX_images.npy`` holds the pixels of all images, in the order of the conversations, uint8 [n, height, width, 3];
``PREFIX_image_starts.npy`` how many of them are before each document, and their number, int64 [documents + 1].
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.common.errors import DataError


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


def write_images(
    prefix: str, size: int, documents: Sequence[Sequence[Any]], read: Callable[[Any], np.ndarray] = lambda image: image
) -> None:
    """Write the images of each document in turn, each uint8 [size, size, 3] once it is ``read``."""
    pixels, starts = _paths(prefix)
    counts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    shape = (int(counts[-1]), size, size, 3)
    if counts[-1]:
        rows = np.lib.format.open_memmap(pixels, "w+", np.uint8, shape)
        for row, image in zip(rows, (image for document in documents for image in document), strict=True):
            row[:] = read(image)
        rows.flush()
    else:
        np.save(pixels, np.zeros(shape, np.uint8))
    np.save(starts, counts)
