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
    """All that a stage does for a batch, in order: a pass in each slot, forward in those of the stage's parity.

    The output of a pass is sent in the next slot, after the receive of a backward pass and before that of a forward
    pass: of two neighbors one then sends while the other receives.
    """
    forward = {stage + 2 * number: (number + 1, True) for number in range(micro_batches)}
    backward = {2 * stages - 1 - stage + 2 * number: (number + 1, False) for number in range(micro_batches)}
    by_slot = forward | backward
    order = [(0, "F" if is_forward else "B", number - 1) for _, (number, is_forward) in sorted(by_slot.items())]
    assert [(0, kind, number) for _, kind, number in Schedule("1f1b", stages, micro_batches).actions(stage)] == order
    is_first, is_last = stage == 0, stage == stages - 1
    done: list[Instruction] = []
    for slot in range(2 * (micro_batches + stages - 1)):
        now, before = by_slot.get(slot), by_slot.get(slot - 1)
        sends = []
        if before and before[1] and not is_last:
            sends = [Instruction("SendActivation", before[0])]
        if before and not before[1] and not is_first:
            sends = [Instruction("SendGrad", before[0])]
        if now is None:
            done += sends
        elif now[1]:
            done += sends
            done += [] if is_first else [Instruction("RecvActivation", now[0])]
            done += [Instruction("LoadMicroBatch", now[0])] if is_first or is_last else []
            done.append(Instruction("ForwardPass", now[0]))
        else:
            done += [] if is_last else [Instruction("RecvGrad", now[0])]
            done += sends
            done.append(Instruction("BackwardPass", now[0]))
    return [*done, *LAST]
