"""Which sentences make sample j: runs of each document's sentences that fill a sample, shuffled epoch by epoch.

A run begins where the one before it ended, and ends with the sentence that reaches its target: the room of a sample,
or with probability ``short_seq_prob`` a number drawn from 2 up to it. It has two sentences or more, and so takes in
the last one of the document where that would be left alone. A document of one sentence has no run.

    runs   [n, 3]         first sentence, the sentence behind the last, and target in tokens
    order  [epochs * n]   the run that the i-th sample is made of

Nothing depends on how many samples are asked for: a longer run of training sees a shorter one's samples first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class SentenceMaps:
    """The two maps; see the top of the file."""

    runs: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class SentenceStream:
    """What the maps are made from.

    Attributes:
        sizes: tokens of each sentence, int32 [sentences].
        bounds: where each document begins, and behind them the number of sentences, int64 [documents + 1].
        room: tokens of both sentences of a sample.
        short_seq_prob: probability of a run that is made shorter.
        wanted: samples asked for; the stream holds whole epochs, so more.
        seed: seed of the targets and of the order.
        salt: tells apart streams that share a seed.
    """

    sizes: np.ndarray
    bounds: np.ndarray
    room: int
    short_seq_prob: float
    wanted: int
    seed: int
    salt: int = 0
    names: ClassVar[tuple[str, ...]] = ("runs", "order")
    """Of the maps."""

    def build(self) -> SentenceMaps:
        """The maps of a stream that has a document of two sentences."""
        runs = self._runs()
        epochs = -(-self.wanted // len(runs))
        orders = [_random(self, 1, epoch).permutation(len(runs)) for epoch in range(epochs)]
        return SentenceMaps(runs, np.concatenate([np.empty(0, np.int64), *orders]))

    def fit(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have shapes that this stream's can have."""
        runs, order = (maps[name] for name in self.names)
        n = len(runs)
        return n > 0 and runs.shape == (n, 3) and order.shape == (-(-self.wanted // n) * n,)

    def _runs(self) -> np.ndarray:
        """All runs, int64 [n, 3]; the next one of every document at a time."""
        tokens = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])  # before each sentence, and in all
        begin, stop = (side[np.diff(self.bounds) >= 2] for side in (self.bounds[:-1], self.bounds[1:]))
        random, found = _random(self, 0, 0), []
        while len(begin):
            is_short = random.random_sample(len(begin)) < self.short_seq_prob
            target = np.where(is_short, random.randint(2, self.room + 1, len(begin)), self.room)
            end = np.maximum(np.searchsorted(tokens, tokens[begin] + target), begin + 2)
            end = np.where(stop - end < 2, stop, end)
            found.append(np.stack([begin, end, target], axis=1))
            begin, stop = end[end < stop], stop[end < stop]
        runs = np.concatenate(found)
        return runs[runs[:, 0].argsort()]


def _random(stream: SentenceStream, purpose: int, epoch: int) -> np.random.RandomState:
    """A generator of its own for every purpose; ``RandomState``, since NumPy has frozen its stream."""
    return np.random.RandomState([stream.seed & 0xFFFFFFFF, stream.seed >> 32, stream.salt, purpose, epoch])
