"""Pipeline schedules against those of torch.distributed.pipelining and DeepSpeed, and their bubbles against theory."""

from collections import Counter
from itertools import chain, combinations, product
from math import ceil
from operator import ge, mul
from random import Random

import pytest
from parallel.conftest import NAMES, every
from torch.distributed.pipelining import schedules as torch_schedules

from megatron.parallel.pipeline.schedule import KINDS, Action, Schedule, has_order
from megatron.parallel.pipeline.simulation import PassSeconds, in_flight, simulate
from megatron.tools.planning.schedule_costs import (
    bubble_ratio,
    idle_seconds,
    idle_share,
    micro_batches_in_flight,
    peaks,
    stages_that_keep_most,
)

TORCH = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbh1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def of_torch(schedule: Schedule, stage: int) -> list[Action]:
    """The passes of a stage in torch's schedule, of which no process group is needed."""
    kind = getattr(torch_schedules, TORCH[schedule.name])
    theirs = object.__new__(kind)
    rounds = max(1, schedule.micro_batches // schedule.stages)
    vars(theirs).update(
        pp_group_size=schedule.stages,
        _num_stages=schedule.stages * schedule.chunks,
        num_stages=schedule.stages * schedule.chunks,
        n_local_stages=schedule.chunks,
        _n_microbatches=schedule.micro_batches,
        microbatches_per_round=schedule.micro_batches // rounds,
    )
    order = (
        theirs._get_pipeline_order()[stage]
        if schedule.name == "1f1b"
        else theirs._calculate_single_rank_operations(stage)
    )
    single = [one for action in order if action for one in action.sub_actions or [action]]
    return [
        Action(one.stage_index, one.computation_type.value, one.microbatch_index) for one in single if one.is_compute_op
    ]


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_the_order_is_torchs(name: str, chunks: int) -> None:
    for schedule in every(name, chunks):
        if name == "1f1b" and schedule.micro_batches < schedule.stages - 1:
            continue  # torch's has passes of micro-batches that are not there
        for stage in range(schedule.stages):
            theirs = of_torch(schedule, stage)
            if name == "dualpipev":  # torch's divides some of the backward passes
                theirs = [one._replace(kind="B" if one.kind == "I" else one.kind) for one in theirs if one.kind != "W"]
            if name == "1f1b" and stage == schedule.stages - 1:  # torch numbers its forward passes from 1 on
                theirs = [action._replace(micro_batch=action.micro_batch - (action.kind == "F")) for action in theirs]
            assert list(schedule.actions(stage)) == theirs, (schedule, stage)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_every_pass_runs_once_and_no_stage_waits_forever(name: str, chunks: int) -> None:
    kinds = "FIW" if KINDS[name].splits_backward else "FB"
    for schedule in every(name, chunks):
        timed = simulate(schedule, PassSeconds())  # asserts that each pass finds its inputs
        ran = Counter((action.chunk, action.micro_batch, kind) for _, action, *_ in timed for kind in action.kind)
        assert ran == Counter(
            (chunk, number, kind)
            for chunk in range(schedule.stages * chunks)
            for number in range(schedule.micro_batches)
            for kind in kinds
        )
        assert all(schedule.stage_of(action.chunk) == stage for stage, action, *_ in timed)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_activations_in_flight(name: str, chunks: int) -> None:
    """The papers': 1F1B min(m, p - s), no more of ZB-H1 and ZB-V than of its first stage, DualPipeV p + 1/2."""
    for schedule in every(name, chunks):
        p, m = schedule.stages, schedule.micro_batches
        kept = [sum(in_flight(schedule, stage)) for stage in range(p)]
        if name == "1f1b":
            assert kept == [min(m, p - stage) for stage in range(p)]
        if name == "zbh1":
            assert kept == [min(m, p)] * p
        if name == "zbv":
            assert max(kept) <= min(2 * p, 2 * m)
        if name == "dualpipev":
            assert kept == [2 * p + 1] * p
        if name == "interleaved" and m % p == 0:
            # arXiv 2205.05198, section 4.2.3: 1 + (p - 1) / (p v) of 1F1B's p micro-batches
            assert kept[0] == min(chunks * m, p * chunks + p - 1)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_a_stage_never_keeps_more_than_at_its_peaks(name: str, chunks: int) -> None:
    for schedule in every(name, chunks):
        for stage in range(schedule.stages):
            own, kept = schedule.chunks_of(stage), Counter[tuple[str, int]]()
            found = peaks(schedule, stage)
            reached, most, is_first = set(), 0, True
            for chunk, kind, _ in schedule.actions(stage):
                number = own.index(chunk)
                if kind != "F":
                    now = tuple(kept[part, number] for number in range(chunks) for part in "FW")
                    alike = [one.counts for one in found if one[:3] == (kind, number, is_first)]
                    assert any(all(map(ge, counts, now)) for counts in alike), (schedule, stage)
                    reached.add((kind, number, is_first, now))
                    most, is_first = max(most, ceil(kept.total() / chunks)), False
                kept["F", number] += {"F": 1, "W": 0}.get(kind, -1)
                kept["W", number] += {"I": 1, "W": -1}.get(kind, 0)
            assert set(found) <= reached
            assert micro_batches_in_flight(schedule, stage) == most


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_stages_that_keep_most_are_known(name: str, chunks: int) -> None:
    """Before each kind of pass, whatever the activations and deferred gradients of a chunk take."""
    random = Random(1)
    sizes = [[(random.random(), random.random() * often) for _ in range(chunks)] for often in (0, 1, 1, 2, 2)]
    for stages, micro_batches in product((3, 5, 8), range(1, 20)):
        if not has_order(name, stages, micro_batches, chunks):
            continue
        schedule = Schedule(name, stages, micro_batches, chunks)
        found = [peaks(schedule, stage) for stage in range(stages)]
        for sized in (*sizes, [sizes[-1][0]] * chunks):
            most = [Counter[tuple]() for _ in found]
            for stage, (*passes, counts) in ((stage, moment) for stage, of in enumerate(found) for moment in of):
                kept = sum(map(mul, counts, chain(*sized)))
                most[stage][tuple(passes)] = max(most[stage][tuple(passes)], kept)
            for first, last in combinations(range(1, stages), 2):
                chosen = [most[stage] for stage in stages_that_keep_most(schedule, first, last)]
                for passes, kept in chain(*(one.items() for one in most[first : last + 1])):
                    limit = max(one.get(passes, 0.0) for one in chosen)
                    assert kept <= limit * (1 + 1e-9), (schedule, first, last)


UNEQUAL = PassSeconds(1.0, 1.25, 0.75)


def test_the_bubble_of_1f1b_and_interleaved_is_the_formula() -> None:
    for name, chunks in NAMES:
        if name in ("1f1b", "interleaved"):
            for schedule in every(name, chunks):
                p, m = schedule.stages, schedule.micro_batches
                if name == "1f1b" or m % p == 0:
                    share = idle_share(schedule, UNEQUAL)
                    assert share / (1 - share) == pytest.approx(bubble_ratio(p, m, chunks)), schedule


@pytest.mark.parametrize("seconds", [PassSeconds(), UNEQUAL, PassSeconds(1, 2, 1)])
def test_the_bubbles_of_zero_bubble_schedules(seconds: PassSeconds) -> None:
    """ZB-H1's is (p - 1) (F + I - W) (arXiv 2401.10241, table 1); a third of 1F1B's where all take equally long."""
    for p, m in ((2, 4), (4, 8), (8, 17), (8, 32)):
        found = idle_seconds(Schedule("zbh1", p, m), seconds)
        assert found == pytest.approx((p - 1) * (seconds.forward + seconds.inputs - seconds.weights))
        halves = PassSeconds(*(one / 2 for one in seconds))
        of_v = idle_seconds(Schedule("zbv", p, m, 2), halves)
        assert of_v <= found / 2 + 1e-9


def test_zbv_leaves_no_bubble_between_passes() -> None:
    """If F, I and W take equally long: stages only start later than the first one, and end earlier than the last."""
    for schedule in every("zbv", 2):
        if schedule.micro_batches >= 2 * schedule.stages - 1:
            timed = simulate(schedule, PassSeconds())
            for stage in range(schedule.stages):
                own = [one for one in timed if one.stage == stage]
                assert own[-1].end - own[0].begin == 3 * 2 * schedule.micro_batches
