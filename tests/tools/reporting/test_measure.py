"""Measures of a timeline for which they are known."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.timelines import BACKWARD, FORWARD, by_theory

from megatron.common.errors import DataError
from megatron.tools.planning.schedule_costs import bubble
from megatron.tools.reporting.files import read_timeline, to_json
from megatron.tools.reporting.pictures import draw
from megatron.tools.reporting.timeline import Event, measure, unit_seconds


@pytest.mark.parametrize("stages, micro_batches", [(1, 2), (2, 1), (2, 3), (4, 8)])
def test_measures_of_an_ideal_pipeline(stages: int, micro_batches: int) -> None:
    measures = measure(by_theory(stages, micro_batches))
    assert measures.theory == bubble(stages, micro_batches) == (stages - 1) / (micro_batches + stages - 1)
    assert measures.bubble == pytest.approx(measures.theory)
    assert measures.seconds == pytest.approx((micro_batches + stages - 1) * (FORWARD + BACKWARD) + 1)
    assert (measures.imbalance, measures.communication) == (1, 0)
    for rank in measures.ranks:
        assert rank["forward"] == pytest.approx(micro_batches * FORWARD)
        assert rank["backward"] == pytest.approx(micro_batches * BACKWARD)
        assert sum(rank.values()) == pytest.approx(measures.seconds)


def test_communication_starts_when_both_ranks_are_ready() -> None:
    timeline = by_theory(2, 1)  # ends at 7, the first pass at 1, the second begins then
    sent = Event("SendActivation", 1.0, 1.5, 5, 1)
    received = Event("RecvActivation", 0.0, 1.5, 5, 1)  # a second of it is waiting
    summed = Event("BackwardPass", 2.5, 2.75, 5, 1, collective="all_reduce")
    timeline = replace(timeline, events=[[*timeline.events[0], sent], [*timeline.events[1], received, summed]])
    first, second = measure(timeline).ranks
    assert (first["transfer"], second["transfer"]) == (0.5, 0.5)
    assert (second["collectives"], second["backward"]) == (0.25, 1.75)
    assert measure(timeline).communication == pytest.approx((0.5 + 0.75) / 2 / 7)
    exchanged = summed._replace(collective="all_to_all_single")
    timeline = replace(timeline, events=[timeline.events[0], [*timeline.events[1], exchanged]])
    assert [measure(timeline).ranks[1][share] for share in ("collectives", "all-to-all")] == [0.25, 0.25]
    assert '"cat": "all-to-all"' in to_json(timeline)


def test_seconds_of_each_layer() -> None:
    layer = (FORWARD + BACKWARD) / 2
    assert unit_seconds(by_theory(2, 3)) == pytest.approx([0, layer, layer, layer, layer, 0])
    timeline = by_theory(2, 3)
    without = [event for event in timeline.events[1] if event.layer != 4]
    again = [event._replace(name="BackwardPass", layer=3) for event in timeline.events[1] if event.layer == 4]
    costs = unit_seconds(
        replace(timeline, shape=replace(timeline.shape, layers=3), events=[timeline.events[0], without])
    )
    assert costs == pytest.approx([0, layer, layer, layer, layer]), "the head is what the last stage has beside layers"
    costs = unit_seconds(
        replace(timeline, shape=replace(timeline.shape, layers=3), events=[timeline.events[0], without + again])
    )
    assert costs[3] == pytest.approx(2 * layer), "a pass that is made again counts"


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", "not a trace of this suite"),
        ('{"traceEvents": []}', "not a trace of this suite"),
        (to_json(replace(by_theory(), events=[[], []])), "not a trace of this suite"),
        *(
            (to_json(by_theory()).replace(right, wrong), "not a trace of this suite")
            for right, wrong in {
                '"dur": 1000000.0': '"dur": "x"',
                '"dur": 2000000.0': '"dur": -1.0',
                '"ts": 0.0': '"ts": NaN',
                '"pid": 1, "tid"': '"pid": -1, "tid"',
                '"pid": 0, "tid"': '"pid": false, "tid"',
                '"ts": 1000000.0': '"ts": -1e300',
                '"dur": 1000000.0, ': '"dur": 1e300, ',
                '"stages": 2': '"stages": "2"',
                '"stages": 2,': '"stages": 1000000000,',
                '"micro_batches": 3': '"micro_batches": 0',
                '"chunks": 1': '"chunks": 1000000000',
                '"layers": 4': '"layers": -1',
                '"pipe": 1': '"pipe": "1"',
                '"micro_batch": 2': '"micro_batch": "2"',
                '"layer": 2': '"layer": 2.5',
                '"iteration": 5, "micro_batch": 1, "layer": 1': '"iteration": 6, "micro_batch": 1, "layer": 1',
            }.items()
        ),
    ],
)
def test_invalid_timeline_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(DataError, match=f"{tmp_path}/trace.json: {message}") as caught:
        read_timeline(tmp_path)
    assert caught.value.exit_code == 3 and len(caught.value.messages) == 1


def test_picture_has_every_pass_and_the_measures() -> None:
    timeline = by_theory(2, 3)
    drawn = draw(timeline, measure(timeline))
    for words in (
        ">rank 1, stage 1</text>",
        ">stage 1</text>",
        "bubble 25.0% (theory: (p-1)/(m+p-1) = 25.0%)",
        "slowest stage over the mean 1.00",
    ):
        assert words in drawn
    for number in (1, 2, 3):
        found = re.findall(f"font-size: 7px.*>{number}</text>", drawn)
        assert len(found) == 2 * 2 * 2, "measured and by theory, forward and backward, two stages"
