"""A timeline made by hand, of two stages that keep to theory."""

from megatron.parallel.pipeline.schedule import timed_passes
from megatron.tools.reporting.timeline import Event, Shape, Timeline

FORWARD, BACKWARD = 1.0, 2.0


def by_theory(stages: int = 2, micro_batches: int = 3) -> Timeline:
    """Forward passes of one second, backward passes of two, of which each layer takes a half and the ends nothing.

    Transfers take no time, and the step one second.
    """
    events: list[list[Event]] = [[] for _ in range(stages)]
    for stage, number, is_forward, begin, end in timed_passes(stages, micro_batches, FORWARD, BACKWARD):
        name, middle = "ForwardPass" if is_forward else "BackwardPass", (begin + end) / 2
        events[stage].append(Event(name, begin, end, 5, number))
        events[stage].append(Event(name, begin, middle, 5, number, layer=2 * stage + 1))
        events[stage].append(Event(name, middle, end, 5, number, layer=2 * stage + 2))
    last = max(event.end for event in events[0])
    for stage in range(stages):
        events[stage].append(Event("OptimizerStep", last, last + 1, 5))
    coordinates = [{"pipe": stage, "data": 0, "model": 0} for stage in range(stages)]
    return Timeline(Shape(stages, micro_batches, "1f1b", 2 * stages), coordinates, events)
