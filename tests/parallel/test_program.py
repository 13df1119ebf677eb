"""The passes and transfers of a stage: every tensor is sent and received once, in an order that cannot hang."""

from collections import Counter

import pytest

from megatron.parallel.pipeline.schedule import Action, Schedule
from megatron.parallel.pipeline.simulation import Transfer, program

SCHEDULES = [
    Schedule("1f1b", 3, 5),
    Schedule("interleaved", 2, 4, 2),
    Schedule("interleaved", 3, 6, 3),
    Schedule("interleaved", 4, 8, 2),
    Schedule("zbh1", 4, 8),
    Schedule("zbv", 2, 3, 2),
    Schedule("zbv", 4, 9, 2),
    Schedule("dualpipev", 3, 7, 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("forward_only", [False, True])
def test_stages_that_wait_for_each_transfer_never_hang(schedule: Schedule, forward_only: bool) -> None:
    """Transfers of a stage that start together end before it continues, which is more than the engine waits for."""
    waiting = [
        [step if isinstance(step, Action) else set(step) for step in program(schedule, stage, forward_only)]
        for stage in range(schedule.stages)
    ]
    done: Counter[Action] = Counter()
    left = -1
    while any(waiting):
        assert left != (left := sum(1 if isinstance(one, Action) else 1 + len(one) for row in waiting for one in row))
        for stage, steps in enumerate(waiting):
            if steps and isinstance(steps[0], Action):
                done[steps.pop(0)] += 1
                continue
            for one in list(steps[0]) if steps else ():
                other = waiting[one.stage][0] if waiting[one.stage] else ()
                if not isinstance(other, Action) and _other_end(one, stage) in other:
                    other.remove(_other_end(one, stage))
                    steps[0].remove(one)
            if steps and not steps[0]:
                steps.pop(0)
    expected = [action for stage in range(schedule.stages) for action in schedule.actions(stage)]
    assert done == Counter(one for one in expected if one.kind == "F" or not forward_only)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_pass_follows_its_transfer(schedule: Schedule) -> None:
    for stage in range(schedule.stages):
        received: set[tuple[bool, int, int]] = set()
        for step in program(schedule, stage):
            if not isinstance(step, Action):
                received |= {(one.is_forward, one.chunk, one.micro_batch) for one in step if not one.is_send}
            elif step.kind != "W":
                before = step.chunk - 1 if step.kind == "F" else step.chunk + 1
                exists = 0 <= before < schedule.stages * schedule.chunks
                if exists and schedule.stage_of(before) != stage:
                    assert (step.kind == "F", step.chunk, step.micro_batch) in received, step


def _other_end(one: Transfer, stage: int) -> Transfer:
    chunk = one.chunk + (1 if one.is_send == one.is_forward else -1)
    return Transfer(not one.is_send, one.is_forward, chunk, one.micro_batch, stage)
