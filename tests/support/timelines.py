"""What a 1F1B pipeline does by theory: the instructions of a stage, and a timeline made by hand."""

from megatron.parallel.pipeline.schedule import Instruction, passes, timed_passes
from megatron.tools.reporting.timeline import Event, Shape, Timeline

FORWARD, BACKWARD = 1.0, 2.0
LAST = (Instruction("ReduceTiedGrads"), Instruction("ReduceGrads"), Instruction("OptimizerStep"))
"""What each stage does after all passes."""


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


def instructions(stage: int, stages: int, micro_batches: int) -> list[Instruction]:
    """All that a stage does for a batch, in order.

    The output of a pass is sent in the next slot, after the receive of a backward pass and before that of a forward
    pass: of two neighbors one then sends while the other receives.
    """
    by_slot = {one.slot: one for one in passes(stage, stages, micro_batches)}
    is_first, is_last = stage == 0, stage == stages - 1
    done: list[Instruction] = []
    for slot in range(2 * (micro_batches + stages - 1)):
        now, before = by_slot.get(slot), by_slot.get(slot - 1)
        sends = []
        if before and before.is_forward and not is_last:
            sends = [Instruction("SendActivation", before.micro_batch)]
        if before and not before.is_forward and not is_first:
            sends = [Instruction("SendGrad", before.micro_batch)]
        if now is None:
            done += sends
        elif now.is_forward:
            done += sends
            done += [] if is_first else [Instruction("RecvActivation", now.micro_batch)]
            done += [Instruction("LoadMicroBatch", now.micro_batch)] if is_first or is_last else []
            done.append(Instruction("ForwardPass", now.micro_batch))
        else:
            done += [] if is_last else [Instruction("RecvGrad", now.micro_batch)]
            done += sends
            done.append(Instruction("BackwardPass", now.micro_batch))
    return [*done, *LAST]
