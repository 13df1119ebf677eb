"""Sample histories with gaps or overlaps, and metrics that cannot be read."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.command_lines import parse

from megatron.checkpoint.sample_history import Segment, extended, read_history
from megatron.common.errors import DataError
from megatron.tools.audit.proof import as_text, prove

LAYOUT = {"PP": 1, "DP": 2, "SP": 1, "TP": 1}
FIRST = Segment(0, 10, 0, 40, 4, LAYOUT, "a")
SECOND = Segment(10, 15, 40, 80, 8, {**LAYOUT, "DP": 1}, "a")


def test_segments_that_join_are_proven(tmp_path: Path) -> None:
    found = prove((FIRST, SECOND), (range(8, 12),), None)
    assert found["faults"] == [] and (found["iterations"], found["samples"], found["logged"]) == (15, 80, None)
    text = "\n".join(as_text(found, tmp_path))
    assert "samples 8 to 11" in text and text.endswith("proven: no sample was repeated, none was skipped")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"first_place": 36, "end_place": 76}, "iterations 11 to 15 begin at sample 36: samples up to 39 repeated"),
        ({"first_place": 44, "end_place": 84}, "iterations 11 to 15 begin at sample 44: samples 40 to 43 skipped"),
        ({"end_place": 84}, "iterations 11 to 15: 44 samples, which is not one batch for each"),
        ({"finished": 9}, "iterations 10 to 15: 40 samples, which is not one batch for each"),
        ({"stream": "b"}, "iterations 11 to 15 read other data than the first ones, or in another order"),
        ({"global_batch_size": 0}, "iterations 11 to 15: trained before sample histories were kept"),
    ],
)
def test_segments_that_do_not_join_are_not_proven(tmp_path: Path, changes: dict, fault: str) -> None:
    found = prove((FIRST, replace(SECOND, **changes)), (), None)
    assert found["faults"][0] == fault
    assert "\n".join(as_text(found, tmp_path)).endswith("not proven")


@pytest.mark.parametrize("content", ["nonsense", '{"consumed_samples": 4}', '["iteration"]', "3"])
def test_invalid_metrics_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics").write_text(content)
    with pytest.raises(DataError, match="metrics:1: not "):
        prove((FIRST,), (), tmp_path / "metrics")
    with pytest.raises(DataError, match="cannot be read"):
        prove((FIRST,), (), tmp_path / "nowhere")


def test_a_history_continues_where_the_checkpoint_ended() -> None:
    run = parse("--global-batch-size 4", ranks=2)
    first = extended((), run, 10)
    assert first == (Segment(0, 10, 0, 40, 4, LAYOUT, first[0].stream),)
    assert read_history({"ledger": [asdict(segment) for segment in first]}, "ck") == first
    larger = replace(run, train=replace(run.train, global_batch_size=8, start_iteration=10, start_sample=40))
    both = extended(first, larger, 15)
    assert both == (first[0], Segment(10, 15, 40, 80, 8, LAYOUT, first[0].stream))
    assert extended(both, larger, 15) == both, "nothing was made yet"
    back = extended(both, larger, 12)
    assert back == (first[0], Segment(10, 12, 40, 56, 8, LAYOUT, first[0].stream)), "a return to before the start"
    assert extended(first, parse("--seed 7"), 20)[1].stream != first[0].stream
