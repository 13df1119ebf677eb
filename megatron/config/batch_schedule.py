"""The global batch size as a function of the consumed samples: constant, a ramp-up, or steps. No torch."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.common.errors import ConfigError

Steps = tuple[tuple[int, int], ...]
"""(samples, batch size): from so many consumed samples on, global batches have this size. The first begins at 0."""


class Phase(NamedTuple):
    """Consecutive iterations with one batch size."""

    finished: int
    """Iterations before it."""
    first_sample: int
    """Samples consumed before it."""
    size: int


@dataclass(frozen=True)
class BatchSchedule:
    """The size of each global batch, and with it how many samples so many iterations consume.

    The size of a batch follows from the samples consumed before it, so that a step of the schedule begins with the
    first iteration at or after its number of samples.
    """

    steps: Steps
    start_iteration: int = 0
    """Iteration after which ``start_sample`` samples were consumed: 0 after 0 unless a run began with other sizes."""
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
        """Such as ``4, 8 from sample 100 on``; a constant size is its number."""
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


def ramp_up(numbers: Sequence[int], global_batch_size: int) -> Steps:
    """The steps of ``--rampup-batch-size START INCR SAMPLES``, as in Megatron-LM but in whole numbers.

    Over the first SAMPLES samples the size grows from START to ``global_batch_size`` by INCR at a time, each time after
    an equal share of them. Raises ConfigError unless the numbers make such a ramp-up.
    """
    flag = f"--rampup-batch-size {' '.join(map(str, numbers))}"
    if len(numbers) != 3 or min(numbers[:2]) < 1 or numbers[2] < 0:
        raise ConfigError(f"{flag}: give the first batch size, its increment and the samples of the ramp-up")
    start, increment, samples = numbers
    if start > global_batch_size:
        raise ConfigError(f"{flag} starts above the global batch of {global_batch_size}: lower the first number")
    increments, rest = divmod(global_batch_size - start, increment)
    if rest:
        raise ConfigError(
            f"{flag}: from {start} to the global batch of {global_batch_size} it is {global_batch_size - start}, which "
            f"is not a multiple of {increment}: choose another increment"
        )
    begins = {
        -(-number * samples // max(increments, 1)): start + number * increment for number in range(increments + 1)
    }
    return tuple(begins.items())  # of sizes that begin together only the last is left


_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_steps(text: str, seq_length: int) -> Steps:
    """The steps of ``--step-batch-size-schedule "0:768 250B:1536"``, whose thresholds are tokens, as in Megatron-LM.

    Raises ConfigError if ``text`` is no such schedule.
    """
    flag = f'--step-batch-size-schedule "{text}"'
    try:
        pairs = [entry.split(":") for entry in text.replace(",", " ").split()]
        steps = sorted((_number(tokens) // max(seq_length, 1), _number(size)) for tokens, size in pairs)
    except ValueError:
        raise ConfigError(f'{flag}: give TOKENS:SIZE for each batch size, such as "0:768 250B:1536"') from None
    begins = [samples for samples, _ in steps]
    if not steps or begins[0] != 0:
        raise ConfigError(f"{flag}: the first batch size begins at 0 tokens, such as 0:768")
    if len(set(begins)) < len(begins):
        raise ConfigError(f"{flag}: two batch sizes begin with the same sample of {seq_length} tokens: remove one")
    if min(size for _, size in steps) < 1:
        raise ConfigError(f"{flag}: a batch has 1 sample or more")
    return tuple(steps)


def _number(text: str) -> int:
    """A whole number that may have a unit, such as 250B or 1.5K. Raises ValueError for anything else."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    number = float(text[:-1] if unit > 1 else text) * unit
    if not 0 <= number < math.inf or number != int(number):
        raise ValueError(text)
    return int(number)
