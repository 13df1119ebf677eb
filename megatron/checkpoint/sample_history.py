"""The sample history of a run: the samples that its iterations consumed, over all restarts and layouts. No torch here.

A resumed run extends the history of its checkpoint, so that the newest checkpoint has the complete history. Samples are
identified by their index in the stream that training reads, which does not count samples skipped after a spike. In
``run.json`` the history is called ``ledger``.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.common.errors import CheckpointError
from megatron.config import RunConfig


@dataclass(frozen=True)
class Segment:
    """Iterations from a start of the run, or a change of the batch size, to the next.

    ``run.json`` has the same fields.
    """

    finished: int
    """Number of iterations before the segment."""
    last: int
    """Last iteration of the segment."""
    first_place: int
    """Index of the first sample."""
    end_place: int
    """Index after the last sample."""
    global_batch_size: int
    """0 if unknown, in a checkpoint without a history."""
    layout: Mapping[str, int]
    """Processes along each axis: PP, DP, SP and TP, from the outermost to the innermost."""
    stream: str
    """Identifies the stream of samples."""

    def sample_indices(self, iteration: int) -> range:
        """Indices of the samples of an ``iteration`` of the segment."""
        start = self.first_place + (iteration - 1 - self.finished) * self.global_batch_size
        return range(start, start + self.global_batch_size)


def extended(history: Sequence[Segment], run: RunConfig, iteration: int) -> tuple[Segment, ...]:
    """The sample history of ``run`` after ``iteration``; ``history`` is the history of the checkpoint it resumed.

    If the run has rewound to before its own start, earlier segments are truncated.
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
    """A hash of the settings that determine the tokens of the n-th sample."""
    data = run.data
    origin = (data.data_hash, data.proportions, data.split if data.is_split else "", data.seq_length, run.train.seed)
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def _up_to(iteration: int, segment: Segment) -> Segment:
    if segment.last <= iteration:
        return segment
    return replace(segment, last=iteration, end_place=segment.sample_indices(iteration).stop)


MOST_SAMPLES = 1 << 50
"""Maximum number of samples of a run: a million in each second of 35 years."""
_AXES = ("PP", "DP", "SP", "TP")


def check_history(description: Mapping[str, Any], path: str) -> None:
    """Raise CheckpointError unless the history, the counts and the skipped samples in a ``run.json`` are consistent."""
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
    length = description["config"]["data"].get("seq_length")
    if length and (tokens := description.get("consumed_tokens", place * length)) != place * length:
        yield f"{place} samples have {tokens} tokens, and a sample {length}"
    for start, stop in description.get("left_out_samples", ()):
        if not skipped <= start < stop:
            yield f"the skipped samples {start} to {stop} are not after sample {skipped}"
        skipped = stop
    if max(place, skipped) > MOST_SAMPLES:
        yield f"no run reads {max(place, skipped):,} samples"


def read_history(description: Mapping[str, Any], path: str) -> tuple[Segment, ...]:
    """The sample history in a ``run.json``; if it has none, a single segment with the known numbers.

    Raises CheckpointError with the ``path`` of the checkpoint if it cannot be read.
    """
    if "ledger" not in description:
        return (Segment(0, description["iteration"], 0, description.get("consumed_samples", 0), 0, {}, ""),)
    try:
        return tuple(Segment(**entry) for entry in description["ledger"])
    except TypeError:
        raise CheckpointError(f"{path} has the sample history of another version, which cannot be read") from None
