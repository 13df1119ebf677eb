"""The global batch size as a function of the consumed samples: constant, a ramp-up, or steps. No torch."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Steps = tuple[tuple[int, int], ...]
"""Pairs (samples, batch size): the global batch size after that many consumed samples. The first pair starts at 0."""


class Phase(NamedTuple):
    """Consecutive iterations with one batch size."""

    finished: int
    """Iterations before this phase."""
    first_sample: int
    """Samples consumed before this phase."""
    size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The size of each global batch, and with it how many samples a number of iterations consumes.

    A step of the schedule takes effect with the first iteration that starts at or after its number of samples.
    """

    steps: Steps
    start_iteration: int = 0
    """Iteration after which ``start_sample`` samples were consumed; 0 unless the run began with other batch sizes."""
    start_sample: int = 0

    @property
    def varies(self) -> bool:
        """Whether there is more than one batch size."""
        return len(self.steps) > 1

    def size(self, iteration: int) -> int:
        """Samples of the global batch of ``iteration``, counted from 1."""
        return self._phase(iteration - 1).size

    def consumed(self, iteration: int) -> int:
        """Samples consumed after ``iteration`` iterations."""
        phase = self._phase(iteration)
        return phase.first_sample + (iteration - phase.finished) * phase.size

    def iterations(self, samples: int) -> int:
        """Iterations whose batches lie completely within the first ``samples`` samples."""
        phase = self._phases[max(bisect_right(self._phases, samples, key=lambda phase: phase.first_sample) - 1, 0)]
        return phase.finished + (samples - phase.first_sample) // phase.size

    def phases(self, finished: int, last: int) -> Iterator[Phase]:
        """The phases of the iterations after ``finished``, up to ``last``; the first begins after ``finished``."""
        if finished < last:
            yield Phase(finished, self.consumed(finished), self.size(finished + 1))
        yield from (phase for phase in self._phases if finished < phase.finished < last)

    def __str__(self) -> str:
        """Text such as ``4, 8 from sample 100 on``; a single number for a constant size."""
        (_, first), *others = self.steps
        return ", ".join([str(first), *(f"{size:,} from sample {samples:,} on" for samples, size in others)])

    def _phase(self, finished: int) -> Phase:
        """The phase of the iteration after ``finished``."""
        return self._phases[max(bisect_right(self._phases, finished, key=lambda phase: phase.finished) - 1, 0)]

    @cached_property
    def _phases(self) -> tuple[Phase, ...]:
        iteration, sample = self.start_iteration, self.start_sample
        phases = []
        for number, (_, size) in enumerate(self.steps):
            if number + 1 == len(self.steps):
                phases.append(Phase(iteration, sample, size))
            elif (rest := self.steps[number + 1][0] - sample) > 0:
                phases.append(Phase(iteration, sample, size))
                iterations = -(-rest // size)
                iteration, sample = iteration + iterations, sample + iterations * size
        return tuple(phases)
