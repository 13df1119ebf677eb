"""Samples of conversations with images for LLaVA: text packed as in ``SFTDataset``, and the images of each sample.

In the text, an image is a sequence of placeholder tokens, one for each embedding of the image.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from megatron.common.errors import DataError
from megatron.common.files import replace_file
from megatron.common.reading import is_present, read_bytes
from megatron.config import DataConfig
from megatron.config.vision import STRETCH, ImageFormat
from megatron.data.mapped_file import map_file, parse_npy, write_npy
from megatron.data.sft_dataset import TOKENS, SFTDataset
from megatron.data.splits import Source


class ImageDataset(SFTDataset):
    """Samples of ``SFTDataset`` with images. A document that is cut inside of an image is cut before that image.

    Attributes:
        images_per_sample: average number of images in a sample.
    """

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        self._format = ImageFormat(*data.image_format)
        self.indexed, self.documents = source.indexed, source.documents
        self._store = ImageStore(source.indexed.prefix, source.indexed.num_documents)
        super().__init__(data, name, source, samples, vocab_size=vocab_size, seed=seed)
        in_order = self._images[self._documents[self._epoch(0)[0][self._members]]]
        self._images_of_bins = np.add.reduceat(in_order, self._bins[:-1])
        self.images_per_sample = float(self._images_of_bins.mean())

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """An error message as of ``SFTDataset``, or about images that are missing, damaged or of another size."""
        size = ImageFormat(*data.image_format).size
        try:
            store = ImageStore(source.indexed.prefix, source.indexed.num_documents)
        except DataError as error:
            return str(error)
        if store.pixels.shape[1:3] != (size, size):
            height, width = store.pixels.shape[1:3]
            return (
                f"{source.indexed.prefix} has images of {height} x {width} pixels, and --vision-image-size is "
                f"{size}: make the data set again for this encoder"
            )
        return SFTDataset.problem(data, name, source)

    def count_images(self, indices: Sequence[int]) -> np.ndarray:
        """The number of images of each sample in ``indices``, int64 [n]."""
        epochs, places = np.divmod(np.asarray(indices, np.int64), self.samples_per_epoch)
        counts = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            counts[inside] = self._images_of_bins[self._epoch(epoch)[1][places[inside]]]
        return counts

    def most_images(self, samples: int) -> np.ndarray:
        """The most images that consecutive ``samples`` can have, in descending order, int64 [samples]."""
        return np.repeat(np.sort(self._images_of_bins)[::-1], 2 + samples // self.samples_per_epoch)[:samples]

    def images(self, indices: Sequence[int]) -> list[np.ndarray]:
        """The images of each sample in ``indices``, in the order of placeholders, uint8 [n, height, width, 3]."""
        return [
            np.concatenate([self._store.pixels[begin:end] for begin, end in self._spans(index)]) for index in indices
        ]

    def describe(self) -> str:
        """The description of ``SFTDataset``, and the number of images."""
        counts = self._images_of_bins
        return f"{super().describe()}; {counts.sum():,} images, up to {counts.max()} in a sample"

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """For each document of a sample, the numbers of its first image and of the image after its last."""
        documents = [document for document, _ in self._documents_of(index)]
        begins = self._store.starts[self.documents.start :][documents]
        return list(zip(begins.tolist(), (begins + self._images[documents]).tolist(), strict=True))

    def _limits(self, positions: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        text, first = self._format, self.documents.start
        images = np.diff(self._store.starts[first : self.documents.stop + 1])
        sizes = positions.clip(max=capacity)
        for document in np.flatnonzero((positions > capacity) & (images > 0)).tolist():
            tokens = self.indexed.span(int(self._starts[document]), capacity)
            places = np.flatnonzero(tokens == text.token)
            images[document] = min(len(places) // text.tokens, images[document])
            if len(places) > images[document] * text.tokens:
                sizes[document] = places[images[document] * text.tokens]
        return sizes, images

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        samples, text = super()._read(indices), self._format
        placeholders = (samples[:, TOKENS] == text.token).sum(axis=1)
        if (placeholders != self.count_images(indices) * text.tokens).any():
            raise DataError(
                f"{self.indexed.prefix}: a document has another number of placeholders ({text.token}) than "
                f"{text.tokens} for each of its images: make the data set again for this encoder"
            )
        return samples


class ImageStore:
    """The images of a data set of conversations, in two NumPy files next to ``PREFIX.bin``, read by memory map.

    ``PREFIX_images.npy`` holds the pixels of all images, in the order of the conversations; ``PREFIX_image_starts.npy``
    holds the number of images before each document, and finally the number of all images.

    Raises DataError if a file is missing, unreadable, damaged, or inconsistent with the other file or ``documents``.

    Attributes:
        pixels: uint8 [n, height, width, 3].
        starts: int64 [documents + 1].
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


def common_image_fit(prefixes: Sequence[str]) -> str:
    """How the images of the data sets became squares (``VisionConfig.image_fit``), recorded next to them.

    Raises DataError if the data sets differ, or a record is damaged.
    """
    fits: dict[str, str] = {}
    for prefix in prefixes:
        file = _fit_file(prefix)
        try:
            fit = read_bytes(file, largest=1024).decode("utf-8", "replace") if is_present(file) else STRETCH
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from None
        fits.setdefault(fit, prefix)
        if not re.fullmatch(r"stretch|crop|pad #[0-9a-f]{6}", fit):
            raise DataError(f"{file} does not say how images became squares: make the data set again")
    if len(fits) > 1:
        (one, first), (other, second), *_ = fits.items()
        raise DataError(f"the images of {first} were made with {one}, of {second} with {other}: make one of them again")
    return next(iter(fits), STRETCH)


def _fit_file(prefix: str) -> Path:
    return Path(f"{prefix}_image_fit.txt")


def _paths(prefix: str) -> tuple[Path, Path]:
    return Path(f"{prefix}_images.npy"), Path(f"{prefix}_image_starts.npy")


def _read(path: Path, dtype: type[np.integer], dimensions: int) -> np.ndarray:
    try:
        array = parse_npy(map_file(path))
    except OSError as error:
        raise DataError(f"{path}: cannot read the images of a data set ({error.strerror})") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error})") from None
    if array.dtype != dtype or array.ndim != dimensions:
        raise DataError(f"{path} holds {array.dtype} {list(array.shape)}, which are not images of a data set")
    return array


@contextmanager
def image_writer(prefix: str, size: int, fit: str = STRETCH) -> Iterator[Callable[[Sequence[np.ndarray]], None]]:
    """Write the files of an ``ImageStore`` in little memory; yields ``add(images)``, called for each document in order.

    ``images`` are uint8 [size, size, 3], made by ``fit``, which is recorded. The files get their names when the block
    ends without an exception.
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
        assert file.tell() == begin, "NumPy pads the header, so that a larger number of images fits"
    with replace_file(starts) as file:
        write_npy(file, np.array(counts, np.int64))
    _fit_file(prefix).unlink(missing_ok=True)
    if fit != STRETCH:
        with replace_file(_fit_file(prefix), text=True) as file:
            file.write(fit)


def _write_header(file: IO[bytes], images: int, size: int) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (images, size, size, 3)}
    np.lib.format.write_array_header_1_0(file, header)
