"""The ledger of a run: which samples its iterations took, through every stop, restart and change of layout.

A run that goes on takes over what the checkpoint says of those before it, so that the newest one has all of it. Samples
are counted in the places of the stream, as training goes through it; a place is a sample, but for those that were left
out behind a spike. No torch here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.config import RunConfig
from megatron.config.errors import CheckpointError

_NUMBERS = ("finished", "last", "first_place", "end_place", "global_batch_size")
_AXES = ("PP", "DP", "SP", "TP")


@dataclass(frozen=True)
class Stretch:
    """Iterations of one start of the run."""

    finished: int
    """Iterations before it."""
    last: int
    """Its last one."""
    first_place: int
    end_place: int
    """Places of its first sample, and behind its last one."""
    global_batch_size: int
    """0 where it was not kept, in a checkpoint without a ledger."""
    layout: Mapping[str, int]
    """Processes along each axis: PP, DP, SP and TP, from the outermost to the innermost."""
    stream: str
    """Tells the stream of samples from any other."""

    def places(self, iteration: int) -> range:
        """Those of one of its iterations."""
        start = self.first_place + (iteration - 1 - self.finished) * self.global_batch_size
        return range(start, start + self.global_batch_size)


def stream_of(run: RunConfig) -> str:
    """A hash of what decides on which tokens the n-th sample has."""
    data = run.data
    origin = (data.data_hash, data.proportions, data.split if data.is_split else "", data.seq_length, run.train.seed)
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def lengthened(earlier: Sequence[Stretch], run: RunConfig, iteration: int) -> tuple[Stretch, ...]:
    """The ledger of ``run`` behind ``iteration``, ``earlier`` being that of the checkpoint it began with.

    Where the run has gone back to before its own beginning, the earlier ones end there, too.
    """
    finished = earlier[-1].last if earlier else 0
    parallel, train = run.parallel, run.train
    own = Stretch(
        finished=finished,
        last=iteration,
        first_place=train.consumed_samples(finished),
        end_place=train.consumed_samples(iteration),
        global_batch_size=train.global_batch_size,
        layout={
            "PP": parallel.pipe_stages,
            "DP": parallel.data_parallel_size,
            "SP": parallel.ds_sequence_parallel_size,
            "TP": parallel.model_parallel_size,
        },
        stream=stream_of(run),
    )
    kept = [_up_to(iteration, stretch) for stretch in earlier if stretch.finished < iteration]
    return (*kept, own) if finished < iteration else tuple(kept)


def _up_to(iteration: int, stretch: Stretch) -> Stretch:
    if stretch.last <= iteration:
        return stretch
    return replace(stretch, last=iteration, end_place=stretch.places(iteration).stop)


def as_entries(ledger: Sequence[Stretch]) -> list[dict[str, Any]]:
    """A ledger for ``run.json``."""
    return [asdict(stretch) for stretch in ledger]


def read_ledger(description: Mapping[str, Any], place: str) -> tuple[Stretch, ...]:
    """The ledger in a ``run.json``; one stretch of which little is known, where there is none in it.

    Raises CheckpointError where there is something else. ``place`` is for the message.
    """
    if "ledger" not in description:
        return (Stretch(0, description["iteration"], 0, description.get("consumed_samples", 0), 0, {}, ""),)
    try:
        return tuple(_read_entry(entry) for entry in description["ledger"])
    except (TypeError, ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{place} has a ledger of samples that cannot be read") from None


def _read_entry(entry: Mapping[str, Any]) -> Stretch:
    numbers = {name: int(entry[name]) for name in _NUMBERS}
    layout = {axis: int(entry["layout"][axis]) for axis in _AXES} if entry["layout"] else {}
    return Stretch(**numbers, layout=layout, stream=str(entry["stream"]))
