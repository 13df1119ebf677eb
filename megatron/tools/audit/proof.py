"""Proves that every sample was consumed once, from the sample history in the checkpoint and the metrics file.

No data are read. The sample history has a range of sample indices for each start of the run; the ranges must join
without gaps and overlaps. The metrics were written by the run in every iteration.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.sample_history import Segment
from megatron.common.errors import counted
from megatron.tools.reporting.files import read_metrics


def prove(history: Sequence[Segment], skipped_samples: Sequence[range], metrics: Path | None) -> dict[str, Any]:
    """Check the sample history, and compare the metrics with it. Returns a dict for JSON and for ``as_text``.

    ``logged`` is the number of iterations of the history that are in the metrics, None without metrics. ``made_again``
    are iterations that ran again after a restart, or after a return to a checkpoint because of a loss spike. Raises
    DataError if the metrics cannot be read.
    """
    errors = [*_history_errors(history), *_skipped_errors(skipped_samples)]
    logged: int | None = None
    repeated: list[list[int]] = []
    last, samples = (history[-1].last, history[-1].end_place) if history else (0, 0)
    if metrics is not None:
        effective, repeated = _effective(
            (where, record["iteration"], record["consumed_samples"])
            for where, record in read_metrics(metrics)
            if "consumed_samples" in record
        )
        inside = [line for line in effective if line[1] <= last]
        logged = len(inside)
        errors += _metrics_errors(history, inside, metrics)
    return {
        "proven": not errors,
        "iterations": last,
        "samples": samples,
        "stretches": [vars(segment) for segment in history],
        "left_out": [[span.start, span.stop] for span in skipped_samples],
        "logged": logged,
        "made_again": repeated,
        "faults": errors,
    }


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
"""Location of a line of metrics, its iteration, and the samples consumed up to it."""


def _effective(lines: Iterable[Line]) -> tuple[list[Line], list[list[int]]]:
    """The lines of iterations that led to the final weights, and first and last iteration of each repeated range."""
    kept: list[Line] = []
    repeated = []
    for line in lines:
        if kept and line[1] <= kept[-1][1]:
            repeated.append([line[1], kept[-1][1]])
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


def as_text(proof: Mapping[str, Any], checkpoint: Path) -> Iterator[str]:
    """The result of ``prove`` as lines of text."""
    yield f"{checkpoint}: {counted(proof['iterations'], 'iteration')}, {counted(proof['samples'], 'sample')}"
    yield f"  {'iterations':>15}  {'samples':>21}  {'batch':>6}  layout"
    for segment in proof["stretches"]:
        iterations = f"{segment['finished'] + 1:,}-{segment['last']:,}"
        samples = f"{segment['first_place']:,}-{segment['end_place'] - 1:,}"
        layout = ", ".join(f"{axis} {size}" for axis, size in segment["layout"].items())
        yield f"  {iterations:>15}  {samples:>21}  {segment['global_batch_size']:>6,}  {layout}"
    for start, stop in proof["left_out"]:
        yield f"skipped after a spike: samples {start:,} to {stop - 1:,}"
    if proof["logged"] is not None:
        yield f"metrics: {counted(proof['logged'], 'line')} about these iterations"
    for first, last in proof["made_again"]:
        yield f"repeated after a restart or a spike: iterations {first:,} to {last:,}"
    yield from (f"WRONG: {error}" for error in proof["faults"])
    skipped = "no other was skipped" if proof["left_out"] else "none was skipped"
    yield f"proven: no sample was repeated, {skipped}" if proof["proven"] else "not proven"
