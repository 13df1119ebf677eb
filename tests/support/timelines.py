"""What a 1F1B pipeline does by theory: the instructions of a stage, and a timeline made by hand."""

from megatron.parallel.pipeline.schedule import Instruction, Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, simulate
from megatron.tools.reporting.timeline import Event, Shape, Timeline

FORWARD, BACKWARD = 1.0, 2.0
LAST = (Instruction("ReduceTiedGrads"), Instruction("ReduceGrads"), Instruction("OptimizerStep"))
"""What each stage does after all passes."""


def by_theory(stages: int = 2, micro_batches: int = 3) -> Timeline:
    """Forward passes of one second, backward passes of two, of which each layer takes a half and the ends nothing.

    Transfers take no time, and the step one second.
    """
    events: list[list[Event]] = [[] for _ in range(stages)]
    seconds = PassSeconds(FORWARD, BACKWARD, 0.0)
    for stage, action, begin, end in simulate(Schedule("1f1b", stages, micro_batches), seconds):
        name, middle = "ForwardPass" if action.kind == "F" else "BackwardPass", (begin + end) / 2
        number = action.micro_batch + 1
        events[stage].append(Event(name, begin, end, 5, number))
        events[stage].append(Event(name, begin, middle, 5, number, layer=2 * stage + 1))
        events[stage].append(Event(name, middle, end, 5, number, layer=2 * stage + 2))
    last = max(event.end for event in events[0])
    for stage in range(stages):
        events[stage].append(Event("OptimizerStep", last, last + 1, 5))
    coordinates = [{"pipe": stage, "data": 0, "model": 0} for stage in range(stages)]
    return Timeline(Shape(stages, micro_batches, "1f1b", 2 * stages), coordinates, events)


def instructions(stage: int, stages: int, micro_batches: int) -> list[Instruction]:
    """All that a stage does for a batch, in order: what a pass needs, the pass, and what it sends."""
    done: list[Instruction] = []
    for _, kind, number in Schedule("1f1b", stages, micro_batches).actions(stage):
        name = "Activation" if kind == "F" else "Grad"
        is_first, is_last = (stage == end for end in ((0, stages - 1) if kind == "F" else (stages - 1, 0)))
        done += [] if is_first else [Instruction(f"Recv{name}", number + 1)]
        done += [Instruction("LoadMicroBatch", number + 1)] if kind == "F" and stage in (0, stages - 1) else []
        done.append(Instruction("ForwardPass" if kind == "F" else "BackwardPass", number + 1))
        done += [] if is_last else [Instruction(f"Send{name}", number + 1)]
    return [*done, *LAST]
