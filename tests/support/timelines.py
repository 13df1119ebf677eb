"""A timeline made by hand, of two stages that keep to theory."""

from megatron.observe.trace.timeline import Event, Shape, Timeline
from megatron.pipe_schedule import passes

FORWARD, BACKWARD = 1.0, 2.0


def by_theory(stages: int = 2, micro_batches: int = 3) -> Timeline:
    """Forward passes of one second, backward passes of two, of which each layer takes a half and the ends nothing.

    Transfers take no time, and the step one second.
    """
    free, ended = [0.0] * stages, {}
    events: list[list[Event]] = [[] for _ in range(stages)]
    in_slots = sorted((p.slot, s, p) for s in range(stages) for p in passes(s, stages, micro_batches))
    for _, stage, (_, number, is_forward) in in_slots:
        name, seconds = ("ForwardPass", FORWARD) if is_forward else ("BackwardPass", BACKWARD)
        begin = max(free[stage], ended.get((name, stage - 1 if is_forward else stage + 1, number), 0.0))
        free[stage] = ended[name, stage, number] = begin + seconds
        events[stage].append(Event(name, begin, free[stage], 5, number))
        for half in (0, 1):
            middle = begin + half * seconds / 2
            events[stage].append(Event(name, middle, middle + seconds / 2, 5, number, layer=2 * stage + half + 1))
    for stage in range(stages):
        events[stage].append(Event("OptimizerStep", max(free), max(free) + 1, 5))
    places = [{"pipe": stage, "data": 0, "model": 0} for stage in range(stages)]
    return Timeline(Shape(stages, micro_batches, "1f1b", 2 * stages), places, events)
