"""Whether every sample was taken once: from the ledger in the checkpoint, and the metrics file beside it.

Nothing is read of the data. The ledger says which places of the stream each start of the run took; they have to join
without a gap and without an overlap. The metrics were written by those runs themselves, as they went.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.sample_history import Stretch
from megatron.config.errors import DataError


@dataclass(frozen=True)
class Proof:
    """What was found."""

    stretches: Sequence[Stretch]
    left_out: Sequence[range]
    logged: int | None
    """Iterations of the ledger that the metrics have; None without metrics."""
    made_again: Sequence[range]
    """Iterations that were lost with a stop, or a return behind a spike, and made once more."""
    faults: Sequence[str]

    @property
    def iterations(self) -> int:
        return self.stretches[-1].last if self.stretches else 0

    @property
    def samples(self) -> int:
        return self.stretches[-1].end_place if self.stretches else 0


def prove(ledger: Sequence[Stretch], left_out: Sequence[range], metrics: Path | None) -> Proof:
    """Hold the ledger to itself, and the metrics to the ledger. Raises DataError where those cannot be read."""
    faults = [*_ledger_faults(ledger), *_left_out_faults(left_out)]
    logged, made_again = None, []
    if metrics is not None:
        effective, made_again = _effective(read_consumed(metrics))
        last = ledger[-1].last if ledger else 0
        inside = [line for line in effective if line[1] <= last]
        logged = len(inside)
        faults += (
            _metrics_faults(ledger, inside, metrics) if inside else [f"{metrics} says nothing of these iterations"]
        )
    return Proof(ledger, left_out, logged, made_again, faults)


def _ledger_faults(ledger: Sequence[Stretch]) -> Iterator[str]:
    iteration = place = 0
    for stretch in ledger:
        which = f"iterations {stretch.finished + 1} to {stretch.last}"
        if not stretch.global_batch_size:
            yield f"{which}: made before ledgers were kept"
        elif stretch.end_place - stretch.first_place != (stretch.last - stretch.finished) * stretch.global_batch_size:
            yield f"{which}: {stretch.end_place - stretch.first_place} samples, which is not one batch for each"
        if stretch.finished != iteration:
            yield f"{which} follow iteration {iteration}"
        if stretch.first_place > place:
            yield f"{which} begin at sample {stretch.first_place}: samples {place} to {stretch.first_place - 1} skipped"
        elif stretch.first_place < place:
            yield f"{which} begin at sample {stretch.first_place}: samples up to {place - 1} repeated"
        if stretch.stream != ledger[0].stream:
            yield f"{which} read other data than the first ones, or in another order"
        iteration, place = stretch.last, stretch.end_place


def _left_out_faults(left_out: Sequence[range]) -> Iterator[str]:
    for earlier, later in zip(left_out, left_out[1:], strict=False):
        if later.start < earlier.stop:
            yield f"samples {later.start} to {earlier.stop - 1} are left out twice"


Line = tuple[int, int, int]
"""Number of a line, its iteration, and the samples consumed behind it."""


def read_consumed(path: Path) -> Iterator[Line]:
    """The training lines of a metrics file. Raises DataError where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                record = dict(json.loads(text))
                if "consumed_samples" in record:
                    yield number, int(record["iteration"]), int(record["consumed_samples"])
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file that --metrics-file wrote") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is no metrics file: give one that --metrics-file wrote") from None


def _effective(lines: Iterator[Line]) -> tuple[list[Line], list[range]]:
    """The lines whose iterations the weights have in them, and the iterations that were made again."""
    kept: list[Line] = []
    made_again = []
    for line in lines:
        if kept and line[1] <= kept[-1][1]:
            made_again.append(range(line[1], kept[-1][1] + 1))
            kept = [earlier for earlier in kept if earlier[1] < line[1]]
        kept.append(line)
    return kept, made_again


def _metrics_faults(ledger: Sequence[Stretch], lines: Sequence[Line], path: Path) -> Iterator[str]:
    if not lines:
        yield f"{path} says nothing of these iterations"
    for number, iteration, consumed in lines:
        stretch = next(stretch for stretch in ledger if iteration <= stretch.last)
        expected = stretch.places(iteration).stop
        if stretch.global_batch_size and consumed != expected:
            yield f"{path}:{number}: {consumed} samples behind iteration {iteration}, where the ledger has {expected}"


def as_dict(proof: Proof) -> dict[str, Any]:
    """For programs."""
    return {
        "proven": not proof.faults,
        "iterations": proof.iterations,
        "samples": proof.samples,
        "stretches": [vars(stretch) for stretch in proof.stretches],
        "left_out": [[span.start, span.stop] for span in proof.left_out],
        "logged": proof.logged,
        "made_again": [[span.start, span.stop - 1] for span in proof.made_again],
        "faults": list(proof.faults),
    }


def as_text(proof: Proof, place: Path) -> Iterator[str]:
    """In lines."""
    yield f"{place}: {proof.iterations:,} iterations, {proof.samples:,} samples"
    yield f"  {'iterations':>15}  {'samples':>21}  {'batch':>6}  layout"
    for stretch in proof.stretches:
        iterations = f"{stretch.finished + 1:,}-{stretch.last:,}"
        samples = f"{stretch.first_place:,}-{stretch.end_place - 1:,}"
        layout = ", ".join(f"{axis} {size}" for axis, size in stretch.layout.items())
        yield f"  {iterations:>15}  {samples:>21}  {stretch.global_batch_size:>6,}  {layout}"
    for span in proof.left_out:
        yield f"left out behind a spike: samples {span.start:,} to {span.stop - 1:,}"
    if proof.logged is not None:
        yield f"metrics: {proof.logged:,} lines about these iterations"
    for span in proof.made_again:
        yield f"made again, after what they did was lost: iterations {span.start:,} to {span.stop - 1:,}"
    yield from (f"WRONG: {fault}" for fault in proof.faults)
    yield "not proven" if proof.faults else "proven: no sample was repeated, none was skipped"
