"""The sample history of a run: which samples its iterations consumed, through all restarts and changes of layout.

A run that resumes takes over the history in the checkpoint, so that the newest checkpoint has all of it. Samples are
counted by their index in the stream that training reads; an index is a sample, except for samples skipped after a
spike. No torch here. In ``run.json`` the history is called ``ledger``.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.common.errors import CheckpointError
from megatron.config import RunConfig


@dataclass(frozen=True)
class Segment:
    """Iterations between a start of the run, or a change of the batch size, and the next.

    Its fields are those in ``run.json``.
    """

    finished: int
    """Iterations before it."""
    last: int
    """Its last iteration."""
    first_place: int
    """Index of its first sample."""
    end_place: int
    """Index after its last sample."""
    global_batch_size: int
    """0 if unknown, in a checkpoint without a history."""
    layout: Mapping[str, int]
    """Processes along each axis: PP, DP, SP and TP, from the outermost to the innermost."""
    stream: str
    """Identifies the stream of samples."""

    def sample_indices(self, iteration: int) -> range:
        """Indices of the samples of one of its iterations."""
        start = self.first_place + (iteration - 1 - self.finished) * self.global_batch_size
        return range(start, start + self.global_batch_size)


def extended(history: Sequence[Segment], run: RunConfig, iteration: int) -> tuple[Segment, ...]:
    """The sample history of ``run`` after ``iteration``; ``history`` is that of the checkpoint it resumed.

    If the run has gone back to before its own start, earlier segments are cut there, too.
    """
    parallel, batches = run.parallel, run.train.batches
    layout = {
        "PP": parallel.pipe_stages,
        "DP": parallel.data_parallel_size,
        "SP": parallel.sequence_ranks,
        "TP": parallel.model_parallel_size,
    }
    phases = list(batches.phases(history[-1].last if history else 0, iteration))
    lasts = [*(phase.finished for phase in phases[1:]), iteration]
    current = [
        Segment(finished, last, first, batches.consumed(last), size, layout, _stream_hash(run))
        for (finished, first, size), last in zip(phases, lasts, strict=False)
    ]
    kept = [_up_to(iteration, segment) for segment in history if segment.finished < iteration]
    return (*kept, *current)


def _stream_hash(run: RunConfig) -> str:
    """A hash of the settings that decide which tokens the n-th sample has."""
    data = run.data
    origin = (data.data_hash, data.proportions, data.split if data.is_split else "", data.seq_length, run.train.seed)
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def _up_to(iteration: int, segment: Segment) -> Segment:
    if segment.last <= iteration:
        return segment
    return replace(segment, last=iteration, end_place=segment.sample_indices(iteration).stop)


_MOST_SAMPLES = 1 << 60
_AXES = ("PP", "DP", "SP", "TP")


def check_history(description: Mapping[str, Any], path: str) -> None:
    """Raises CheckpointError unless the history in a ``run.json``, its counts and the skipped samples fit together."""
    if problem := next(_problems(description, read_history(description, path)), None):
        raise CheckpointError(f"{path}: the history of samples is wrong: {problem}")


def _problems(description: Mapping[str, Any], history: Sequence[Segment]) -> Iterator[str]:
    finished, place, skipped = 0, 0, 0
    for segment in history:
        iterations, samples = segment.last - finished, segment.end_place - place
        if (segment.finished, segment.first_place) != (finished, place) or iterations < 0 or samples < 0:
            yield f"iteration {finished} and sample {place} are not followed by the next ones"
        if segment.global_batch_size and samples != iterations * segment.global_batch_size:
            yield f"{iterations} iterations have {samples} samples"
        if segment.global_batch_size and any(segment.layout.get(axis, 0) < 1 for axis in _AXES):
            yield f"the layout after iteration {finished} is {dict(segment.layout)}"
        finished, place = segment.last, segment.end_place
    counts = description["iteration"], description.get("consumed_samples", place)
    if counts != (finished, place):
        yield f"it ends with iteration {finished} and sample {place}, not {counts[0]} and {counts[1]}"
    for start, stop in description.get("left_out_samples", ()):
        if not skipped <= start < stop:
            yield f"the skipped samples {start} to {stop} are not after sample {skipped}"
        skipped = stop
    if max(place, skipped) > _MOST_SAMPLES:
        yield f"no run reads {max(place, skipped):,} samples"


def read_history(description: Mapping[str, Any], path: str) -> tuple[Segment, ...]:
    """The sample history in a ``run.json``. Without one: a single segment with the numbers that are known.

    Raises CheckpointError if it cannot be read. ``path`` is the checkpoint, for the message.
    """
    if "ledger" not in description:
        return (Segment(0, description["iteration"], 0, description.get("consumed_samples", 0), 0, {}, ""),)
    try:
        return tuple(Segment(**entry) for entry in description["ledger"])
    except TypeError:
        raise CheckpointError(f"{path} has the sample history of another version, which cannot be read") from None
