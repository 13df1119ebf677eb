"""Samples of an evaluation: tokens of which some are predicted, windows of a long text, and scores. No torch here."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Consecutive tokens, the last of which are predicted, each from all before it."""

    tokens: np.ndarray
    """Integers [n + 1]; the first n are the input."""
    predicted: int
    """Number of predicted tokens, from 1 to n."""
    text: Sequence[int] = ()
    """What an encoder reads, of a model that has one."""


class Windows(Sequence[Sample]):
    """Windows of ``size`` inputs of a long text, each ``stride`` after the one before; computed on demand.

    Every token but the first is predicted exactly once: the first window predicts all of its tokens, each
    later one its ``stride`` new tokens, so that they have at least ``size - stride`` tokens before them.
    """

    def __init__(self, tokens: np.ndarray, *, size: int, stride: int):
        assert 1 <= stride <= size
        self._tokens, self._size, self._stride = tokens, size, stride
        self.predicted = max(len(tokens) - 1, 0)
        """Total number of predicted tokens."""

    def __len__(self) -> int:
        return 1 + math.ceil(max(self.predicted - self._size, 0) / self._stride) if self.predicted else 0

    def __getitem__(self, number: int) -> Sample:  # type: ignore[override]  # slices are not needed
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._stride
        end = min(start + self._size, self.predicted)
        seen_before = start + self._size - self._stride if number else 0
        return Sample(self._tokens[start : end + 1], end - seen_before)


def last_inputs(tokens: Sequence[int], predicted: int, size: int) -> Sample:
    """The sample of ``tokens``, limited to its last ``size`` inputs."""
    return Sample(np.asarray(tokens[-(size + 1) :]), predicted)


class Scores(NamedTuple):
    """The scores of n samples."""

    nll: np.ndarray
    """Negative log-likelihood of all its predicted tokens, in nats: float64 [n]."""
    right: np.ndarray
    """Whether each of them was the most likely one: bool [n]."""
