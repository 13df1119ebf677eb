"""Samples of several data sets, in the order of a blend."""

from collections.abc import Sequence

import numpy as np

from megatron.data.blend import BlendOrder
from megatron.data.gpt2_dataset import GPT2Dataset, Span


class BlendedDataset:
    """Samples of a blend, in the order of training.

    Args:
        parts: the data sets.
        order: where each sample is found in them.
        samples: how many there are.
    """

    def __init__(self, parts: Sequence[GPT2Dataset], order: BlendOrder, samples: int) -> None:
        self.parts, self.order = parts, order
        self._samples = samples

    def __len__(self) -> int:
        """Samples in the blend, as many as were asked for."""
        return self._samples

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of the ``index``-th sample to train on, int64 [seq_length + 1]. Raises DataError as its part does."""
        if not 0 <= index < self._samples:
            raise IndexError(index)
        source, place = self.order[index]
        return self.parts[source][place]

    def spans(self, index: int) -> list[Span]:
        """The pieces of documents that make the ``index``-th sample."""
        source, place = self.order[index]
        return self.parts[source].spans(place)
