"""The timeline of a traced run, and its file in Chrome's trace format for Perfetto and chrome://tracing.

No torch here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megatron.parallel.pipeline.schedule import KINDS, Schedule, has_order

FORMAT = 1
EVENT_DETAILS = ("micro_batch", "phase", "layer", "collective")
"""Optional fields of an event, beside its name, its times and its iteration."""
_KINDS = {
    "LoadMicroBatch": "load", "ForwardPass": "forward", "BackwardPass": "backward", "BackwardInputPass": "backward",
    "BackwardWeightPass": "weights", "SendActivation": "send",
    "SendGrad": "send", "RecvActivation": "receive", "RecvGrad": "receive", "CommitP2P": "exchange",
    "ReduceGrads": "reduce", "ReduceTiedGrads": "reduce", "OptimizerStep": "step",
}  # fmt: skip
"""Category of each instruction. Viewers give each category a color."""


class Event(NamedTuple):
    """An instruction, or a layer or collective inside one. Times are seconds on the clock of rank 0."""

    name: str
    begin: float
    end: float
    iteration: int
    micro_batch: int | None = None
    phase: int | None = None
    layer: int | None = None
    """Number of the transformer layer, from 1, if the event is one layer's pass."""
    collective: str | None = None
    """Name of the collective, if the event is one."""

    @property
    def kind(self) -> str:
        """Category: load, forward, backward, weights, send, receive, exchange, reduce, step or other.

        Where a backward pass is divided, backward are the gradients of the inputs, and weights those of the weights.
        """
        return _KINDS.get(self.name, "other")

    @property
    def is_whole(self) -> bool:
        """Whether this is an instruction, not a layer or collective inside one."""
        return self.layer is None and self.collective is None

    @property
    def is_all_to_all(self) -> bool:
        """Whether this is an exchange between all ranks of a group, as of tokens between the ranks of their experts."""
        return self.collective is not None and self.collective.startswith("all_to_all")

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shape:
    """The settings of a run that are needed to interpret its timeline."""

    stages: int
    micro_batches: int
    schedule: str
    layers: int
    chunks: int = 1
    """Model chunks of a stage."""


@dataclass(frozen=True)
class Timeline:
    """All traced events of a run."""

    shape: Shape
    coordinates: Sequence[Mapping[str, int]]
    """Of each rank: its coordinate on each axis of the layout."""
    events: Sequence[Sequence[Event]]
    """Of each rank, ordered by their end."""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule of the passes; None if there is none of this name for so many micro-batches."""
        shape, divided = self.shape, any(event.kind == "weights" for events in self.events for event in events)
        form = (shape.schedule, shape.stages, shape.micro_batches, shape.chunks)
        return Schedule(*form, splits_backward=divided) if shape.schedule in KINDS and has_order(*form) else None

    @property
    def iterations(self) -> list[int]:
        """The traced iterations, in order."""
        return sorted({event.iteration for events in self.events for event in events})

    @property
    def pipelines(self) -> list[list[int]]:
        """Ranks of each pipeline, ordered by stage."""
        pipelines: dict[tuple, list[int]] = {}
        for rank, of_rank in enumerate(self.coordinates):
            key = tuple((axis, number) for axis, number in sorted(of_rank.items()) if axis != "pipe")
            pipelines.setdefault(key, []).append(rank)
        return [sorted(ranks, key=lambda rank: self.coordinates[rank]["pipe"]) for ranks in pipelines.values()]

    def seconds(self, iteration: int) -> float:
        """Duration of an iteration, from its first instruction to its last."""
        return span([event for rank in range(len(self.coordinates)) for event in self.instructions(rank, iteration)])

    def instructions(self, rank: int, iteration: int) -> list[Event]:
        """The instructions that ``rank`` ran in ``iteration``, without the layers and collectives inside them."""
        return self._instructions[rank].get(iteration, [])

    @cached_property
    def _instructions(self) -> list[dict[int, list[Event]]]:
        """Of each rank: its instructions by iteration."""
        by_iteration: list[dict[int, list[Event]]] = [{} for _ in self.events]
        for of_rank, events in zip(by_iteration, self.events, strict=True):
            for event in events:
                if event.is_whole:
                    of_rank.setdefault(event.iteration, []).append(event)
        return by_iteration


def span(events: Sequence[Event]) -> float:
    """Seconds from the beginning of the first event to the end of the last."""
    return max(event.end for event in events) - min(event.begin for event in events)


def to_json(timeline: Timeline, ranks: Iterable[int], **metadata: Any) -> str:
    """The trace file of ``ranks``, with further ``metadata``."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        coordinates = ", ".join(f"{axis} {number}" for axis, number in timeline.coordinates[rank].items())
        rows.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}: {coordinates}"}})
        rows.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
        rows += [_row(rank, event) for event in timeline.events[rank]]
    other_data = {"format": FORMAT, **asdict(timeline.shape), "places": list(timeline.coordinates), **metadata}
    return json.dumps({"displayTimeUnit": "ms", "otherData": other_data, "traceEvents": rows})


def _row(rank: int, event: Event) -> dict[str, Any]:
    details = {name: value for name in EVENT_DETAILS if (value := getattr(event, name)) is not None}
    return {
        "name": event.collective or (event.name if event.is_whole else f"layer {event.layer}"),
        "cat": "all-to-all" if event.is_all_to_all else "collective" if event.collective else event.kind,
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": round(event.begin * 1e6, 3),
        "dur": round(event.seconds * 1e6, 3),
        "args": {"instruction": event.name, "iteration": event.iteration, **details},
    }
