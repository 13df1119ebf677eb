"""Measures of a timeline: bubble, imbalance, communication, and each rank's shares of the time. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import bubble
from megatron.tools.reporting.timeline import Event, Timeline

SHARES = ("forward", "backward", "collectives", "transfer", "reduce", "step", "load", "waiting")
"""What a rank spends its time on. Collectives are those inside the passes, for example of tensor parallelism, and are
not counted in forward and backward. A transfer starts when both ranks have started it. Waiting is the rest."""
PASSES, COMMUNICATION = SHARES[:3], SHARES[2:5]
"""The shares that add up to the passes of a stage, and those that are communication."""
_PARTNERS = {
    "SendActivation": ("RecvActivation", 1), "RecvActivation": ("SendActivation", -1),
    "SendGrad": ("RecvGrad", -1), "RecvGrad": ("SendGrad", 1),
}  # fmt: skip
"""For each end of a transfer: the instruction at the other end, and the difference of the stage numbers."""


class Measures(NamedTuple):
    """Medians over the traced iterations, and means over the pipelines."""

    seconds: float
    """Of an iteration, from its first instruction to its last."""
    bubble: float
    """Share of the time from the first forward pass to the last backward pass in which stages run neither."""
    theory: float | None
    """The same where all passes of a kind take equally long; None for schedules without a formula."""
    imbalance: float
    """Time in passes of the slowest stage, divided by the mean over the stages."""
    communication: float
    """Share of an iteration that ranks spend in collectives, in transfers between stages, and in the reduction."""
    ranks: tuple[dict[str, float], ...]
    """Of each rank: seconds of an iteration for each of ``SHARES``."""


def measure(timeline: Timeline) -> Measures:
    """All measures of a timeline."""
    iterations, pipelines = timeline.iterations, timeline.pipelines
    spent = [_spent(timeline, iteration) for iteration in iterations]
    ranks = tuple(
        {share: median(of_ranks[rank][share] for of_ranks in spent) for share in SHARES}
        for rank in range(len(timeline.coordinates))
    )
    seconds = median(_span(_all(timeline, range(len(ranks)), iteration)) for iteration in iterations)
    shape = timeline.shape
    busy = [[sum(ranks[rank][share] for share in PASSES) for rank in pipeline] for pipeline in pipelines]
    return Measures(
        seconds=seconds,
        bubble=mean(median(_bubble(timeline, ranks, n) for n in iterations) for ranks in pipelines),
        theory=bubble(shape.stages, shape.micro_batches) if shape.schedule == "1f1b" else None,
        imbalance=mean(max(stages) / max(mean(stages), 1e-12) for stages in busy),
        communication=mean(sum(rank[share] for share in COMMUNICATION) for rank in ranks) / max(seconds, 1e-12),
        ranks=ranks,
    )


def _all(timeline: Timeline, ranks: Iterable[int], iteration: int) -> list[Event]:
    return [event for rank in ranks for event in timeline.instructions(rank, iteration)]


def _span(events: Sequence[Event]) -> float:
    return max(event.end for event in events) - min(event.begin for event in events)


def _bubble(timeline: Timeline, pipeline: Sequence[int], iteration: int) -> float:
    passes = [event for event in _all(timeline, pipeline, iteration) if event.kind in ("forward", "backward")]
    return 1 - sum(event.seconds for event in passes) / (len(pipeline) * max(_span(passes), 1e-12))


def _spent(timeline: Timeline, iteration: int) -> list[dict[str, float]]:
    """Of each rank: the seconds of ``iteration`` for each of ``SHARES``."""
    span = _span(_all(timeline, range(len(timeline.coordinates)), iteration))
    of_ranks: list[dict[str, float]] = [{} for _ in timeline.coordinates]
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
                if event.kind in SHARES:
                    spent[event.kind] += event.seconds
                elif event.name in _PARTNERS:
                    spent["transfer"] += _transfer(event, stage, stages)
                if event.kind == "backward":  # the plain engine reduces inside it
                    spent["backward"] -= sum(e.seconds for e in reductions if event.begin <= e.begin < event.end)
            for event in timeline.events[rank]:
                if event.iteration == iteration and event.collective and event.kind in ("forward", "backward"):
                    spent["collectives"] += event.seconds
                    spent[event.kind] -= event.seconds
            spent["waiting"] = max(span - sum(spent.values()), 0.0)
            of_ranks[rank] = spent
    return of_ranks


def _transfer(event: Event, stage: int, stages: Sequence[Mapping[tuple, Event]]) -> float:
    """Seconds of this end of a transfer after the other end has started; 0 if the transfer went through a queue."""
    name, offset = _PARTNERS[event.name]
    is_inside = 0 <= stage + offset < len(stages)
    other = stages[stage + offset].get((name, event.micro_batch, event.phase)) if is_inside else None
    return max(event.end - max(event.begin, other.begin), 0.0) if other else 0.0
