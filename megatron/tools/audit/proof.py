"""Proof that every sample was consumed once, from the sample history in the checkpoint and the metrics file.

No data are read. The history has the sample indices of each start of the run; they must join without gaps and
overlaps. The metrics were written by the runs themselves, in every iteration.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.sample_history import Segment
from megatron.common.errors import counted
from megatron.tools.reporting.files import read_metrics


@dataclass(frozen=True)
class Proof:
    """The result."""

    segments: Sequence[Segment]
    skipped_samples: Sequence[range]
    logged: int | None
    """Iterations of the history that are in the metrics; None without metrics."""
    repeated: Sequence[range]
    """Iterations that were lost in a restart, or in a return to a checkpoint after a spike, and run again."""
    errors: Sequence[str]

    @property
    def iterations(self) -> int:
        return self.segments[-1].last if self.segments else 0

    @property
    def samples(self) -> int:
        return self.segments[-1].end_place if self.segments else 0


def prove(history: Sequence[Segment], skipped_samples: Sequence[range], metrics: Path | None) -> Proof:
    """Check the history, and the metrics against it. Raises DataError if the metrics cannot be read."""
    errors = [*_history_errors(history), *_skipped_errors(skipped_samples)]
    logged = None
    repeated: list[range] = []
    if metrics is not None:
        effective, repeated = _effective(
            (where, record["iteration"], record["consumed_samples"])
            for where, record in read_metrics(metrics)
            if "consumed_samples" in record
        )
        last = history[-1].last if history else 0
        inside = [line for line in effective if line[1] <= last]
        logged = len(inside)
        errors += _metrics_errors(history, inside, metrics)
    return Proof(history, skipped_samples, logged, repeated, errors)


def _history_errors(history: Sequence[Segment]) -> Iterator[str]:
    iteration = index = 0
    for segment in history:
        which = f"iterations {segment.finished + 1} to {segment.last}"
        if not segment.global_batch_size:
            yield f"{which}: trained before sample histories were kept"
        elif segment.end_place - segment.first_place != (segment.last - segment.finished) * segment.global_batch_size:
            yield f"{which}: {segment.end_place - segment.first_place} samples, which is not one batch for each"
        if segment.finished != iteration:
            yield f"{which} follow iteration {iteration}"
        if segment.first_place > index:
            yield f"{which} begin at sample {segment.first_place}: samples {index} to {segment.first_place - 1} skipped"
        elif segment.first_place < index:
            yield f"{which} begin at sample {segment.first_place}: samples up to {index - 1} repeated"
        if segment.stream != history[0].stream:
            yield f"{which} read other data than the first ones, or in another order"
        iteration, index = segment.last, segment.end_place


def _skipped_errors(skipped_samples: Sequence[range]) -> Iterator[str]:
    for earlier, later in zip(skipped_samples, skipped_samples[1:], strict=False):
        if later.start < earlier.stop:
            yield f"samples {later.start} to {earlier.stop - 1} are skipped twice"


Line = tuple[str, int, int]
"""Location of a line, its iteration, and the samples consumed after it."""


def _effective(lines: Iterable[Line]) -> tuple[list[Line], list[range]]:
    """The lines of the iterations that led to the weights, and the iterations that were repeated."""
    kept: list[Line] = []
    repeated = []
    for line in lines:
        if kept and line[1] <= kept[-1][1]:
            repeated.append(range(line[1], kept[-1][1] + 1))
            kept = [earlier for earlier in kept if earlier[1] < line[1]]
        kept.append(line)
    return kept, repeated


def _metrics_errors(history: Sequence[Segment], lines: Sequence[Line], path: Path) -> Iterator[str]:
    if not lines:
        yield f"{path} has no lines of these iterations"
    for where, iteration, consumed in lines:
        segment = next(segment for segment in history if iteration <= segment.last)
        expected = segment.sample_indices(iteration).stop
        if segment.global_batch_size and consumed != expected:
            yield f"{where}: {consumed} samples after iteration {iteration}, but {expected} in the checkpoint"


def as_dict(proof: Proof) -> dict[str, Any]:
    """The proof for JSON."""
    return {
        "proven": not proof.errors,
        "iterations": proof.iterations,
        "samples": proof.samples,
        "stretches": [vars(segment) for segment in proof.segments],
        "left_out": [[span.start, span.stop] for span in proof.skipped_samples],
        "logged": proof.logged,
        "made_again": [[span.start, span.stop - 1] for span in proof.repeated],
        "faults": list(proof.errors),
    }


def as_text(proof: Proof, checkpoint: Path) -> Iterator[str]:
    """In lines."""
    yield f"{checkpoint}: {counted(proof.iterations, 'iteration')}, {counted(proof.samples, 'sample')}"
    yield f"  {'iterations':>15}  {'samples':>21}  {'batch':>6}  layout"
    for segment in proof.segments:
        iterations = f"{segment.finished + 1:,}-{segment.last:,}"
        samples = f"{segment.first_place:,}-{segment.end_place - 1:,}"
        layout = ", ".join(f"{axis} {size}" for axis, size in segment.layout.items())
        yield f"  {iterations:>15}  {samples:>21}  {segment.global_batch_size:>6,}  {layout}"
    for span in proof.skipped_samples:
        yield f"skipped after a spike: samples {span.start:,} to {span.stop - 1:,}"
    if proof.logged is not None:
        yield f"metrics: {counted(proof.logged, 'line')} about these iterations"
    for span in proof.repeated:
        yield f"repeated after a restart or a spike: iterations {span.start:,} to {span.stop - 1:,}"
    yield from (f"WRONG: {error}" for error in proof.errors)
    yield "not proven" if proof.errors else "proven: no sample was repeated, none was skipped"
