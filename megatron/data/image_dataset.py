"""Samples of conversations with images: packed as for instruction tuning, with a fixed number of image slots each.

The text of an image is a run of placeholder tokens, as many as the language model sees of it. Documents are packed into
samples that have the positions and the slots for them; slots that are left are black, and no token reads them.
"""

from collections.abc import Sequence

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.vision import ImageSlots
from megatron.data.image_store import ImageStore
from megatron.data.sft_dataset import SFTDataset
from megatron.data.splits import Source


class ImageDataset(SFTDataset):
    """Samples in bytes, uint8 [n, bytes]: of the four rows of ``SFTDataset``, then of the images of all slots.

    A document ends before an image that is not complete within its sample, or has no slot there.
    """

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        self._slots = ImageSlots(*data.image_slots)
        self.indexed, self.documents = source.indexed, source.documents
        self._store = ImageStore(source.indexed.prefix, source.indexed.num_documents)
        super().__init__(data, name, source, samples, vocab_size=vocab_size, seed=seed)

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """As of ``SFTDataset``, or of images that are missing, damaged or of another size."""
        slots = ImageSlots(*data.image_slots)
        try:
            store = ImageStore(source.indexed.prefix, source.indexed.num_documents)
        except DataError as error:
            return str(error)
        if store.pixels.shape[1:3] != (slots.size, slots.size):
            height, width = store.pixels.shape[1:3]
            return (
                f"{source.indexed.prefix} has images of {height} x {width} pixels, and --vision-image-size is "
                f"{slots.size}: make the data set again for this encoder"
            )
        return SFTDataset.problem(data, name, source)

    def _limits(self, positions: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        slots, first = self._slots, self.documents.start
        counts = np.diff(self._store.starts[first : self.documents.stop + 1])
        sizes, images = positions.clip(max=capacity), np.minimum(counts, slots.slots)
        for document in np.flatnonzero((positions > capacity) & (counts > 0) | (counts > slots.slots)).tolist():
            tokens = self.indexed.span(int(self._starts[document]), int(sizes[document]))
            places = np.flatnonzero(tokens == slots.token)
            images[document] = min(len(places) // slots.tokens, slots.slots)
            if len(places) > images[document] * slots.tokens:
                sizes[document] = places[images[document] * slots.tokens]
        return sizes, images

    def describe(self) -> str:
        """As of ``SFTDataset``, and how many image slots are empty."""
        empty = 1 - int(self._images[self._documents].sum()) / (self.samples_per_epoch * self._slots.slots)
        return f"{super().describe()}; {empty:.1%} of the image slots empty"

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        text, slots = super()._read(indices), self._slots
        images = np.zeros((len(indices), slots.slots, slots.size, slots.size, 3), np.uint8)
        for row, index, pictures in zip(text, indices, images, strict=True):
            of_documents: list[int] = []
            for document, _ in self._documents_of(index):
                begin = int(self._store.starts[self.documents.start + document])
                of_documents += range(begin, begin + int(self._images[document]))
            if (row[0] == slots.token).sum() != len(of_documents) * slots.tokens:
                raise DataError(
                    f"{self.indexed.prefix}: a document has another number of placeholders ({slots.token}) than "
                    f"{slots.tokens} for each of its images: make the data set again for this encoder"
                )
            for picture, number in zip(pictures, of_documents, strict=False):
                picture[:] = self._store.pixels[number]
        parts = (text.view(np.uint8), images)
        return np.concatenate([part.reshape(len(indices), -1) for part in parts], axis=1)
