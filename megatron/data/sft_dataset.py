"""Samples for instruction tuning: documents packed into samples of ``seq_length`` positions, with padding.

A document of L tokens takes L - 1 positions: all tokens but the last are inputs, all but the first are labels, so that
no label is in another document. ``PREFIX_loss_mask`` has an entry for each token of PREFIX: 1 if it counts in the loss
as a label, else 0. Documents that are longer than a sample are cut at the end.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.data import SPLITS, loss_mask_prefix
from megatron.data.indexed_dataset import IndexedDataset, check_tokens
from megatron.data.splits import Source, SourceSamples, advice, describe_split, seed_words

TOKENS, SEGMENTS, LABELS, LOSS_MASK = range(4)
"""Indices of the rows of a sample."""


def pack(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack sizes into bins by best-fit decreasing: each goes where it leaves the least space, or into a new bin.

    ``sizes`` are integers from 1 to ``capacity``, in descending order, [n]. Returns ``members``, the indices into them
    bin by bin, int64 [n], and ``starts``, the first member of each bin and finally n, int64 [bins + 1].
    """
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    for index, size in enumerate(sizes.tolist()):
        at = bisect_left(spaces, size)
        if at < len(spaces):
            space = spaces[at]
            chosen = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
            bins[chosen].append(index)
        else:
            space, chosen = capacity, len(bins)
            bins.append([index])
        if left := space - size:
            if left not in with_space:
                insort(spaces, left)
            with_space.setdefault(left, []).append(chosen)
    starts = np.cumsum([0, *map(len, bins)])
    return np.fromiter((index for members in bins for index in members), np.int64, len(sizes)), starts


class SFTDataset(SourceSamples):
    """Samples for instruction tuning: tokens, segment ids, labels and loss mask, int64 [4, seq_length].

    Each epoch exchanges documents of the same length and number of images at random, and shuffles the samples; the
    number of samples in an epoch is constant.

    Attributes:
        samples_per_epoch: number of samples in an epoch.
        cut_documents: number of documents that are longer than a sample.
    """

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        indexed, documents = source.indexed, source.documents
        self._starts = indexed.document_starts[documents.start : documents.stop + 1]
        positions = np.diff(self._starts) - 1
        sizes, self._images = self._limits(positions, data.seq_length)
        self._documents = np.flatnonzero(sizes > 0)
        self._sizes = sizes[self._documents]
        self.cut_documents = int(np.count_nonzero(positions > sizes.clip(min=0)))
        order = np.lexsort((self._images[self._documents], -self._sizes))
        self._members, self._bins = pack(self._sizes[order], data.seq_length)
        self.samples_per_epoch = len(self._bins) - 1
        epochs = -(-samples // self.samples_per_epoch)
        super().__init__(source, epochs * self.samples_per_epoch, epochs)
        self._loss_mask = IndexedDataset(loss_mask_prefix(indexed.prefix))
        self._seq_length, self._vocab_size = data.seq_length, vocab_size
        self._seed_words = [*seed_words(seed), SPLITS.index(name)]
        self._epoch = lru_cache(maxsize=2)(self._order_of)

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """An error message for a source without a loss mask, or without a document in the split ``name``; else None."""
        _, indexed, documents = source
        try:
            loss_mask = IndexedDataset(loss_mask_prefix(indexed.prefix))
        except DataError as error:
            maker = "tools/preprocess_data.py --format messages or prompt-completion"
            return f"{error}; --sft reads a data set made by {maker}"
        if not np.array_equal(loss_mask.document_starts, indexed.document_starts):
            return f"{loss_mask.prefix} is not the loss mask of {indexed.prefix}: its documents have other lengths"
        split = describe_split(data, name, source)
        starts = indexed.document_starts[documents.start : documents.stop + 1]
        positions = np.diff(starts) - 1
        if not (positions > 0).any():
            return f"{split} has no document: {advice(data, name, source)}"
        kept = zip(starts[:-1].tolist(), positions.clip(0, data.seq_length).tolist(), strict=True)
        if any(_mask_of(loss_mask, start + 1, size).any() for start, size in kept if size):
            return None
        return (
            f"{split}: no token that counts is among the first {data.seq_length + 1} of a document: raise --seq-length"
        )

    def _limits(self, positions: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and images that a sample takes of each document, which has ``positions``."""
        return positions.clip(max=capacity), np.zeros_like(positions)

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        samples = np.zeros((len(indices), 4, self._seq_length), np.int64)
        for sample, index in zip(samples, indices, strict=True):
            end = 0
            documents = self._documents_of(index)
            for number, (document, size) in enumerate(documents):
                begin, end = end, end + size
                start = int(self._starts[document])
                where = f"document {self.documents.start + document}"
                tokens = check_tokens(self.indexed, self.indexed.span(start, size + 1), where, self._vocab_size)
                sample[TOKENS, begin:end], sample[LABELS, begin:end] = tokens[:-1], tokens[1:]
                sample[LOSS_MASK, begin:end] = _mask_of(self._loss_mask, start + 1, size)
                sample[SEGMENTS, begin:end] = number
            sample[SEGMENTS, end:] = len(documents)
        return samples

    def describe(self) -> str:
        """A text with the number of documents, samples of an epoch and cut documents, and the share of padding."""
        filled = int(self._sizes.sum()) / (self.samples_per_epoch * self._seq_length)
        text = (
            f"{len(self._documents):,} documents in {self.samples_per_epoch:,} samples an epoch, "
            f"{1 - filled:.1%} of them padding"
        )
        starts = (int(start) for start in self._starts[self._documents[self._sizes == self._seq_length]])
        lost = sum(not self._loss_mask.span(start + 1, self._seq_length).any() for start in starts)
        text += f"; {self.cut_documents:,} longer than a sample, cut at the end" if self.cut_documents else ""
        return text + (f"; {lost:,} of no effect, as their answers come after the cut" if lost else "")

    def _documents_of(self, index: int) -> list[tuple[int, int]]:
        """Each document of sample ``index``, counted from the first of the split, and its number of positions."""
        epoch, at = divmod(index, self.samples_per_epoch)
        by_size, order = self._epoch(epoch)
        first, stop = self._bins[order[at] : order[at] + 2]
        chosen = by_size[self._members[first:stop]]
        return list(zip(self._documents[chosen].tolist(), self._sizes[chosen].tolist(), strict=True))

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of an epoch, longest first and shuffled within a length, and the order of its samples."""
        random = np.random.RandomState([*self._seed_words, epoch])
        shuffled = random.permutation(len(self._sizes))
        images = self._images[self._documents[shuffled]]
        by_size = shuffled[np.lexsort((images, -self._sizes[shuffled]))]
        return by_size, random.permutation(self.samples_per_epoch)


def _mask_of(loss_mask: IndexedDataset, start: int, size: int) -> np.ndarray:
    """The loss mask of ``size`` tokens from ``start`` on, [size]. Raises DataError if a value is not 0 or 1."""
    mask = loss_mask.span(start, size)
    if (wrong := (mask != 0) & (mask != 1)).any():
        raise DataError(f"{loss_mask.bin_path} holds {mask[wrong.argmax()]}, and should hold 0 and 1: make it again")
    return mask
