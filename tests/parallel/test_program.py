"""The passes and transfers of a stage: every tensor is sent and received once, in an order that cannot hang on NCCL."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from parallel.conftest import NAMES, every

from megatron.parallel import p2p_lanes
from megatron.parallel.pipeline.program import Transfer, program
from megatron.parallel.pipeline.schedule import Action, Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, in_flight, simulate


class Issued(NamedTuple):
    """What a rank gives to its GPU: a pass, or an end of a transfer on the stream of a group."""

    transfer: Any = None
    """The same for both ends; None for a pass."""
    lane: int = 0
    awaits: tuple[Any, ...] = ()
    """Transfers that end before this begins, since the stream or the host waits for them."""


def issued(schedule: Schedule, stage: int, *, forward_only: bool, is_first: bool) -> Iterator[Issued]:
    """What the engine issues in a step, or in the first one, in which the host waits for shapes."""
    lanes = p2p_lanes(schedule.stages, schedule.name == "interleaved")
    most, leaving = 2 * sum(in_flight(schedule, stage)), deque[Any]()
    known, awaits = set[Any](), list[Any]()
    for step in program(schedule, stage, forward_only, receives_early=not is_first):
        if isinstance(step, Action):
            one = received(schedule, step)
            yield Issued(awaits=(*awaits, *([key(one)] if one else [])))
            awaits = []
            continue
        lane, shape = lanes[(stage, step.stage) if step.is_send else (step.stage, stage)], key(step)[:2]
        if is_first and shape not in known:
            known.add(shape)
            yield Issued(shape, lane)
            if not step.is_send:
                yield Issued(awaits=(shape,))
        yield Issued(key(step), lane)
        if step.is_send:
            leaving.append(key(step))
            awaits += [leaving.popleft()] if len(leaving) > most else []
    yield Issued(awaits=tuple(leaving))


def key(one: Transfer) -> tuple[bool, int, int]:
    """The same for both ends."""
    return one.is_forward, one.boundary, one.micro_batch


def received(schedule: Schedule, action: Action) -> Transfer | None:
    """The end of the transfer that ``action`` waits for."""
    before = action.chunk + (-1 if action.kind == "F" else 1)
    if action.kind == "W" or not 0 <= before < schedule.stages * schedule.chunks:
        return None
    source = schedule.stage_of(before)
    own = schedule.stage_of(action.chunk)
    return None if source == own else Transfer(False, action.kind == "F", action.chunk, action.micro_batch, source)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_no_rank_hangs_on_nccl(name: str, chunks: int, forward_only: bool, is_first: bool) -> None:
    """A transfer takes place when both ends have begun, never before: NCCL need not buffer. Passes follow theirs.

    Each group has a stream. With CUDA_DEVICE_MAX_CONNECTIONS=1 kernels begin in the order in which they were issued,
    so one that cannot begin yet holds up all that follow, whatever their stream.
    """
    for schedule in every(name, chunks, (2, 3, 4, 5, 8)):
        ranks = [
            deque(issued(schedule, stage, forward_only=forward_only, is_first=is_first))
            for stage in range(schedule.stages)
        ]
        for stage in range(0 if is_first else schedule.stages):
            passes = [step for step in program(schedule, stage, forward_only) if isinstance(step, Action)]
            assert passes == [one for one in schedule.actions(stage) if one.kind == "F" or not forward_only]
        begun: Counter[Any] = Counter()
        running: list[dict[int, Any]] = [{} for _ in ranks]
        progress = True
        while progress:
            progress = False
            for items, lanes in zip(ranks, running, strict=True):
                while items and can_begin(items[0], lanes, begun):
                    one = items.popleft()
                    if one.transfer is not None:
                        lanes[one.lane] = one.transfer
                        begun[one.transfer] += 1
                    progress = True
        assert not any(ranks), schedule
        assert set(begun.values()) <= {2}, "both ends of each transfer"


def can_begin(one: Issued, lanes: dict[int, Any], begun: Counter[Any]) -> bool:
    """Whether what ``one`` waits for has ended, and the transfer before it in its stream."""
    before = [lanes[one.lane]] if one.transfer is not None and one.lane in lanes else []
    return all(begun[other] == 2 for other in (*one.awaits, *before))


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_no_stage_waits_for_a_late_receiver(name: str, chunks: int) -> None:
    """It waits for a send only when what it has received since proves that the other stage has taken it."""
    for schedule in every(name, chunks, (2, 3, 4, 5, 8)):
        past: dict[Action, set[Action]] = {}
        last: dict[int, Action] = {}
        for stage, action, *_ in simulate(schedule, PassSeconds()):
            before = [last[stage]] if stage in last else []
            if (one := received(schedule, action)) is not None:
                chunk = action.chunk + (-1 if one.is_forward else 1)
                before += [other for other in last_of(past, chunk, action) if other.kind != "W"]
            past[action] = {action}.union(*(past[other] for other in before))
            last[stage] = action
        for stage in range(schedule.stages):
            most, leaving = 2 * sum(in_flight(schedule, stage)), deque[tuple]()
            for before, step in pairwise(program(schedule, stage)):
                if isinstance(before, Action):
                    now = before
                if isinstance(step, Transfer) and step.is_send:
                    leaving.append(key(step))
                    if len(leaving) > most:
                        is_forward, boundary, number = leaving.popleft()
                        taken = {(one.chunk, one.kind == "F", one.micro_batch) for one in past[now]}
                        assert (boundary + is_forward, is_forward, number) in taken, (schedule, stage)


def last_of(past: dict[Action, set[Action]], chunk: int, action: Action) -> list[Action]:
    """The pass through ``chunk`` whose output ``action`` needs."""
    kinds = "F" if action.kind == "F" else "IB"
    return [one for kind in kinds if (one := Action(chunk, kind, action.micro_batch)) in past]


@pytest.mark.parametrize("is_ring", [False, True])
def test_a_stage_has_one_neighbor_in_each_group(is_ring: bool) -> None:
    for stages in range(1, 12):
        lanes = p2p_lanes(stages, is_ring)
        last = stages if is_ring else stages - 1
        pairs = {(stage, (stage + 1) % stages) for stage in range(last) if stages > 1}
        assert set(lanes) == pairs | {(late, early) for early, late in pairs}
        ends = Counter((lane, stage) for pair, lane in lanes.items() for stage in pair)
        assert set(ends.values()) <= {1}
