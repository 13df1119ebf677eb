"""What ranks did and when, and its file: Chrome's trace format, which Perfetto and chrome://tracing open. No torch."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.errors import ConfigError
from megatron.parallel.pipeline.partition import TRACE

_FORMAT = 1
_PARTS = ("micro_batch", "phase", "layer", "collective")
"""What an event may have beside its name, its times and its iteration."""
_KINDS = {
    "LoadMicroBatch": "load", "ForwardPass": "forward", "BackwardPass": "backward", "SendActivation": "send",
    "SendGrad": "send", "RecvActivation": "receive", "RecvGrad": "receive", "CommitP2P": "exchange",
    "ReduceGrads": "reduce", "ReduceTiedGrads": "reduce", "OptimizerStep": "step",
}  # fmt: skip
"""What each instruction is, in words that the viewers give a colour each."""


class Event(NamedTuple):
    """An instruction, or a part of one. Times in seconds on the clock of rank 0."""

    name: str
    begin: float
    end: float
    iteration: int
    micro_batch: int | None = None
    phase: int | None = None
    layer: int | None = None
    """Of the part of a layer: its number, from 1 on."""
    collective: str | None = None
    """Of the part of a collective: its name."""

    @property
    def kind(self) -> str:
        """What it is: load, forward, backward, send, receive, exchange, reduce, step."""
        return _KINDS.get(self.name, "other")

    @property
    def is_whole(self) -> bool:
        """Whether it is an instruction, and no part of one."""
        return self.layer is None and self.collective is None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shape:
    """What has to be known of a run to read its timeline."""

    stages: int
    micro_batches: int
    schedule: str
    layers: int


@dataclass(frozen=True)
class Timeline:
    """All that was traced of a run."""

    shape: Shape
    places: Sequence[Mapping[str, int]]
    """Of each rank: its place on each axis of the layout."""
    events: Sequence[Sequence[Event]]
    """Of each rank, in the order in which they ended."""

    @property
    def iterations(self) -> list[int]:
        """Those traced, in order."""
        return sorted({event.iteration for events in self.events for event in events})

    @property
    def pipelines(self) -> list[list[int]]:
        """Ranks in the order of their stages, for each pipeline."""
        found: dict[tuple, list[int]] = {}
        for rank, place in enumerate(self.places):
            found.setdefault(tuple((axis, n) for axis, n in sorted(place.items()) if axis != "pipe"), []).append(rank)
        return [sorted(ranks, key=lambda rank: self.places[rank]["pipe"]) for ranks in found.values()]

    def instructions(self, rank: int, iteration: int) -> list[Event]:
        """What ``rank`` did in ``iteration``, in whole instructions."""
        return self._instructions[rank].get(iteration, [])

    @cached_property
    def _instructions(self) -> list[dict[int, list[Event]]]:
        """Of each rank, by iteration."""
        found: list[dict[int, list[Event]]] = [{} for _ in self.events]
        for of_rank, events in zip(found, self.events, strict=True):
            for event in events:
                if event.is_whole:
                    of_rank.setdefault(event.iteration, []).append(event)
        return found


def to_json(timeline: Timeline, ranks: Iterable[int], **about: Any) -> str:
    """The trace of ``ranks``, with what else is ``about`` it."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        place = ", ".join(f"{axis} {number}" for axis, number in timeline.places[rank].items())
        rows.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}: {place}"}})
        rows.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
        rows += [_row(rank, event) for event in timeline.events[rank]]
    other = {"format": _FORMAT, **asdict(timeline.shape), "places": list(timeline.places), **about}
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": rows})


def _row(rank: int, event: Event) -> dict[str, Any]:
    parts = {name: value for name in _PARTS if (value := getattr(event, name)) is not None}
    return {
        "name": event.collective or (event.name if event.is_whole else f"layer {event.layer}"),
        "cat": "collective" if event.collective else event.kind,
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": round(event.begin * 1e6, 3),
        "dur": round(event.seconds * 1e6, 3),
        "args": {"instruction": event.name, "iteration": event.iteration, **parts},
    }


def read_timeline(place: Path) -> Timeline:
    """The timeline in a folder of ``--trace``, or in its trace.json.

    Raises:
        ConfigError: where it cannot be read, or was not written by a run of this suite.
    """
    path = place / TRACE if place.is_dir() else place
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a folder of --trace") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON; name a folder of --trace") from error
    try:
        return _timeline(found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path}: not a trace of this suite; name a folder of --trace") from error


def _timeline(found: Any) -> Timeline:
    about = found["otherData"]
    if about["format"] != _FORMAT:
        raise ValueError
    shape = Shape(
        *(_count(about[name]) for name in ("stages", "micro_batches")), str(about["schedule"]), about["layers"]
    )
    places = [{str(axis): int(number) for axis, number in place.items()} for place in about["places"]]
    events: list[list[Event]] = [[] for _ in places]
    for row in found["traceEvents"]:
        if row["ph"] == "X":
            told, begin = row["args"], _time(row["ts"])
            parts = {name: told[name] for name in _PARTS if name in told}
            end, iteration = begin + _time(row["dur"]), _count(told["iteration"])
            events[row["pid"]].append(Event(str(told["instruction"]), begin, end, iteration, **parts))
    if not any(events) or any("pipe" not in place for place in places):
        raise ValueError
    return Timeline(shape, places, events)


def _time(microseconds: Any) -> float:
    if not math.isfinite(microseconds):
        raise ValueError
    return microseconds / 1e6


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value
