"""The timeline of a traced run: the time that ranks spend in each activity, the pipeline bubble, and layer times.

Does not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import KINDS, Schedule, has_order
from megatron.parallel.pipeline.simulation import PassSeconds
from megatron.tools.planning.schedule_costs import bubble, idle_share

_KINDS = {
    "LoadMicroBatch": "load", "ForwardPass": "forward", "BackwardPass": "backward", "BackwardInputPass": "backward",
    "BackwardWeightPass": "weights", "SendActivation": "send",
    "SendGrad": "send", "RecvActivation": "receive", "RecvGrad": "receive",
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
    """Number of the transformer layer, from 1, if the event is a pass of a layer."""
    collective: str | None = None
    """Name of the collective, if the event is a collective."""

    @property
    def kind(self) -> str:
        """Category: load, forward, backward, weights, send, receive, reduce, step or other.

        In a split backward pass, backward is the gradients of the inputs, and weights the gradients of the weights.
        """
        return _KINDS.get(self.name, "other")

    @property
    def category(self) -> str:
        """``kind`` for an instruction or layer; "all-to-all" or "collective" for collectives."""
        if self.collective is None:
            return self.kind
        return "all-to-all" if self.collective.startswith("all_to_all") else "collective"

    @property
    def is_instruction(self) -> bool:
        """Whether this is an instruction, not a layer or collective inside one."""
        return self.layer is None and self.collective is None

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shape:
    """The settings of a run that are needed to interpret its timeline."""

    stages: int
    micro_batches: int
    schedule: str
    layers: int
    chunks: int = 1
    """Number of model chunks of a stage."""


@dataclass(frozen=True)
class Timeline:
    """All traced events of a run."""

    shape: Shape
    coordinates: Sequence[Mapping[str, int]]
    """For each rank, its coordinate on each axis of the layout."""
    events: Sequence[Sequence[Event]]
    """The events of each rank, ordered by their end."""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The pipeline schedule; None if its name is unknown, or if it does not support the run's sizes."""
        shape = self.shape
        arguments = (shape.schedule, shape.stages, shape.micro_batches, shape.chunks)
        return Schedule(*arguments) if shape.schedule in KINDS and has_order(*arguments) else None

    @property
    def iterations(self) -> list[int]:
        """The traced iterations, in order."""
        return sorted({event.iteration for events in self.events for event in events})

    @property
    def pipelines(self) -> list[list[int]]:
        """Ranks of each pipeline, ordered by stage."""
        pipelines: dict[tuple, list[int]] = {}
        for rank, coordinates in enumerate(self.coordinates):
            key = tuple((axis, number) for axis, number in sorted(coordinates.items()) if axis != "pipe")
            pipelines.setdefault(key, []).append(rank)
        return [sorted(ranks, key=lambda rank: self.coordinates[rank]["pipe"]) for ranks in pipelines.values()]

    def seconds(self, iteration: int) -> float:
        """Duration of an iteration, from its first instruction to its last."""
        return span([event for rank in range(len(self.coordinates)) for event in self.instructions(rank, iteration)])

    def instructions(self, rank: int, iteration: int) -> list[Event]:
        """The instructions that ``rank`` ran in ``iteration``, without the layers and collectives inside them."""
        return [event for event in self.events[rank] if event.iteration == iteration and event.is_instruction]


def span(events: Sequence[Event]) -> float:
    """Seconds from the beginning of the first event to the end of the last."""
    return max(event.end for event in events) - min(event.begin for event in events)


def unit_seconds(timeline: Timeline) -> list[float]:
    """Seconds per micro-batch, forward and backward: of the embeddings, each layer, and the head with the loss.

    Layers are timed individually. The time of the embeddings is that of the first stage's passes minus its layers, the
    time of the head the same for the last stage; if one stage has both, all counts as the head. The trace file stores
    this list for ``--repartition-from``.
    """
    layers = [_layer_seconds(timeline, number) for number in range(1, timeline.shape.layers + 1)]
    ends = [min(pipeline[end] for pipeline in timeline.pipelines) for end in (0, -1)]
    if timeline.shape.schedule in KINDS and KINDS[timeline.shape.schedule].is_v:
        ends[1] = ends[0]  # the first stage also has the head
    front, back = (_outside_layers(timeline.events[rank]) for rank in ends)
    return [front if ends[0] != ends[1] else 0.0, *layers, back]


def _layer_seconds(timeline: Timeline, layer: int) -> float:
    """Median forward pass of a layer plus its median backward pass, recomputation included."""
    passes: dict[str, dict[tuple, float]] = {}
    for rank, events in enumerate(timeline.events):
        for event in events:
            if event.layer == layer:
                # A recomputed layer runs forward again inside the backward pass.
                times, key = passes.setdefault(event.name, {}), (rank, event.iteration, event.micro_batch)
                times[key] = times.get(key, 0.0) + event.seconds
    return sum(median(times.values()) for times in passes.values())


def _outside_layers(events: Sequence[Event]) -> float:
    """Median over the micro-batches of a rank: seconds of its passes outside the transformer layers."""
    seconds: dict[tuple, float] = {}
    for event in events:
        if event.kind in ("forward", "backward") and not event.collective:
            key = event.iteration, event.micro_batch
            seconds[key] = seconds.get(key, 0.0) + (event.seconds if event.layer is None else -event.seconds)
    return max(median(seconds.values()), 0.0) if seconds else 0.0


SHARES = ("forward", "backward", "collectives", "all-to-all", "transfer", "reduce", "step", "load", "waiting")
"""Activities of a rank. Collectives are those inside the passes, for example of tensor parallelism, and are subtracted
from forward and backward; all-to-alls, such as of tokens to their experts, are counted separately. Backward includes
the gradients of the weights. A transfer begins when both ranks have started it. Waiting is the remaining time."""
PASSES, COMMUNICATION = SHARES[:4], SHARES[2:6]
"""The shares that make up the passes of a stage, and the shares that are communication."""
_PARTNERS = {
    "SendActivation": ("RecvActivation", 1), "RecvActivation": ("SendActivation", -1),
    "SendGrad": ("RecvGrad", -1), "RecvGrad": ("SendGrad", 1),
}  # fmt: skip
"""For each transfer instruction: the instruction at the other end, and the offset of that end's model chunk."""
_COMPUTING = ("forward", "backward", "weights")
"""Categories of the passes."""


class Measures(NamedTuple):
    """Performance measures: medians over the traced iterations, and means over the pipelines."""

    seconds: float
    """Duration of an iteration, from its first instruction to its last."""
    bubble: float
    """Idle share of the stages between the first forward pass and the last backward pass."""
    theory: float | None
    """The bubble of the ideal schedule, in which passes of a kind take equally long; None for unknown schedules."""
    imbalance: float
    """Time in passes of the slowest stage, divided by the mean over the stages."""
    communication: float
    """Share of an iteration that ranks spend in collectives, in transfers between stages, and in the reduction."""
    ranks: tuple[dict[str, float], ...]
    """For each rank, seconds of an iteration in each of ``SHARES``."""


def measure(timeline: Timeline) -> Measures:
    """All measures of a timeline."""
    iterations, pipelines = timeline.iterations, timeline.pipelines
    spent = [_spent(timeline, iteration) for iteration in iterations]
    ranks = tuple(
        {share: median(iteration[rank][share] for iteration in spent) for share in SHARES}
        for rank in range(len(timeline.coordinates))
    )
    seconds = median(map(timeline.seconds, iterations))
    busy = [[sum(ranks[rank][share] for share in PASSES) for rank in pipeline] for pipeline in pipelines]
    return Measures(
        seconds=seconds,
        bubble=mean(median(_bubble(timeline, ranks, n) for n in iterations) for ranks in pipelines),
        theory=mean(median(_theory(timeline, ranks, n) for n in iterations) for ranks in pipelines)
        if timeline.schedule
        else None,
        imbalance=mean(max(stages) / max(mean(stages), 1e-12) for stages in busy),
        communication=mean(sum(rank[share] for share in COMMUNICATION) for rank in ranks) / max(seconds, 1e-12),
        ranks=ranks,
    )


def _bubble(timeline: Timeline, pipeline: Sequence[int], iteration: int) -> float:
    passes = [
        event for rank in pipeline for event in timeline.instructions(rank, iteration) if event.kind in _COMPUTING
    ]
    return 1 - sum(event.seconds for event in passes) / (len(pipeline) * max(span(passes), 1e-12))


def pass_seconds(timeline: Timeline, pipeline: Sequence[int], iteration: int) -> PassSeconds:
    """Seconds of each kind of pass of a model chunk: medians over passes, averaged over the stages.

    A backward pass that is not split counts as the backward pass of the inputs.
    """
    medians = {
        kind: mean(
            median([e.seconds for e in timeline.instructions(rank, iteration) if e.kind == kind] or [0.0])
            for rank in pipeline
        )
        for kind in _COMPUTING
    }
    return PassSeconds(*(medians[kind] for kind in _COMPUTING))


def _theory(timeline: Timeline, pipeline: Sequence[int], iteration: int) -> float:
    assert timeline.schedule is not None
    if timeline.schedule.name == "1f1b":
        return bubble(timeline.schedule.stages, timeline.schedule.micro_batches)
    return idle_share(timeline.schedule, pass_seconds(timeline, pipeline, iteration))


def _spent(timeline: Timeline, iteration: int) -> list[dict[str, float]]:
    """For each rank, the seconds of ``iteration`` spent in each of ``SHARES``."""
    span = timeline.seconds(iteration)
    by_rank: list[dict[str, float]] = [{} for _ in timeline.coordinates]
    for pipeline in timeline.pipelines:
        stages = [
            {(event.name, event.micro_batch, event.phase): event for event in timeline.instructions(rank, iteration)}
            for rank in pipeline
        ]
        for stage, rank in enumerate(pipeline):
            spent = dict.fromkeys(SHARES, 0.0)
            events = timeline.instructions(rank, iteration)
            reductions = [event for event in events if event.kind == "reduce"]
            for event in events:
                if event.kind in _COMPUTING or event.kind in SHARES:
                    spent[_share(event)] += event.seconds
                elif event.name in _PARTNERS:
                    spent["transfer"] += _transfer(timeline.schedule, event, stage, stages)
                if event.kind == "backward":  # DeepSpeedEngine reduces gradients inside it
                    spent["backward"] -= sum(e.seconds for e in reductions if event.begin <= e.begin < event.end)
            for event in timeline.events[rank]:
                if event.iteration == iteration and event.collective and event.kind in _COMPUTING:
                    spent["collectives" if event.category == "collective" else "all-to-all"] += event.seconds
                    spent[_share(event)] -= event.seconds
            spent["waiting"] = max(span - sum(spent.values()), 0.0)
            by_rank[rank] = spent
    return by_rank


def _share(event: Event) -> str:
    return "backward" if event.kind == "weights" else event.kind


def _transfer(schedule: Schedule | None, event: Event, stage: int, stages: Sequence[Mapping[tuple, Event]]) -> float:
    """Seconds of a transfer instruction after the other end has started; 0 if the two ends cannot be matched."""
    if schedule is None:
        return 0.0
    name, offset = _PARTNERS[event.name]
    chunk = schedule.chunks_of(stage)[event.phase or 0] + offset
    if not 0 <= chunk < schedule.stages * schedule.chunks:
        return 0.0
    partner = schedule.stage_of(chunk)
    phase = None if event.phase is None else schedule.chunks_of(partner).index(chunk)
    other = stages[partner].get((name, event.micro_batch, phase))
    return max(event.end - max(event.begin, other.begin), 0.0) if other else 0.0
