"""What a model is asked: stretches of tokens, the last of which it has to predict. No torch here."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Tokens in a row, and how many of the last are to be predicted from all before them."""

    tokens: np.ndarray
    """Integers [n + 1]: the model sees the first n."""
    predicted: int
    """From 1 to n."""


class Windows(Sequence[Sample]):
    """One long text in windows of ``size`` inputs, each ``stride`` behind the one before; made when asked for.

    Every token but the first of all is predicted exactly once: the first window predicts all it can, each
    later one the ``stride`` tokens that are new in it, so that they have at least ``size - stride`` before them.
    """

    def __init__(self, tokens: np.ndarray, *, size: int, stride: int):
        assert 1 <= stride <= size
        self._tokens, self._size, self._stride = tokens, size, stride
        self.predicted = max(len(tokens) - 1, 0)
        """Tokens that the windows predict, all together."""

    def __len__(self) -> int:
        return 1 + math.ceil(max(self.predicted - self._size, 0) / self._stride) if self.predicted else 0

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._stride
        end = min(start + self._size, self.predicted)
        seen_before = start + self._size - self._stride if number else 0
        return Sample(self._tokens[start : end + 1], end - seen_before)


def last_inputs(tokens: Sequence[int], predicted: int, size: int) -> Sample:
    """The sample of ``tokens`` with the last ``size`` inputs that a model can see."""
    return Sample(np.asarray(tokens[-(size + 1) :]), predicted)
