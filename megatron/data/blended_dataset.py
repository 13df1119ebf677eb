"""Samples of several data sets, in the order of a blend."""

from collections.abc import Sequence

import numpy as np

from megatron.data.bert_dataset import BertDataset
from megatron.data.blend import BlendOrder
from megatron.data.gpt2_dataset import GPT2Dataset, Span


class BlendedDataset:
    """Samples of a blend, in the order of training.

    Args:
        parts: the data sets.
        order: where each sample is found in them.
        samples: how many there are.
    """

    def __init__(self, parts: Sequence[GPT2Dataset | BertDataset], order: BlendOrder, samples: int) -> None:
        self.parts, self.order = parts, order
        self._samples = samples

    def __len__(self) -> int:
        """Samples in the blend, as many as were asked for."""
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        """The ``index``-th sample to train on, as its part gives it. Raises DataError as its part does."""
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, [n, ...]. Raises DataError as their parts do."""
        if wrong := [index for index in indices if not 0 <= index < self._samples]:
            raise IndexError(wrong[0])
        found = [self.order[index] for index in indices]
        rows = {
            source: iter(self.parts[source].take([place for of, place in found if of == source]))
            for source in {source for source, _ in found}
        }
        return np.stack([next(rows[source]) for source, _ in found])

    def spans(self, index: int) -> list[Span]:
        """The pieces of documents that make the ``index``-th sample."""
        source, place = self.order[index]
        return self.parts[source].spans(place)
