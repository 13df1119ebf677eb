"""Ledgers that do not join, and metrics that cannot be read."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.command_lines import parse

from megatron.checkpoint.sample_history import Stretch, as_entries, lengthened, read_ledger
from megatron.config.errors import CheckpointError, DataError
from megatron.tools.audit.proof import as_text, prove

LAYOUT = {"PP": 1, "DP": 2, "SP": 1, "TP": 1}
FIRST = Stretch(0, 10, 0, 40, 4, LAYOUT, "a")
SECOND = Stretch(10, 15, 40, 80, 8, {**LAYOUT, "DP": 1}, "a")


def test_stretches_that_join_are_a_proof(tmp_path: Path) -> None:
    found = prove((FIRST, SECOND), (range(8, 12),), None)
    assert found.faults == [] and (found.iterations, found.samples, found.logged) == (15, 80, None)
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
        ({"global_batch_size": 0}, "iterations 11 to 15: made before ledgers were kept"),
    ],
)
def test_stretches_that_do_not_join_are_none(tmp_path: Path, changes: dict, fault: str) -> None:
    found = prove((FIRST, replace(SECOND, **changes)), (), None)
    assert found.faults[0] == fault
    assert "\n".join(as_text(found, tmp_path)).endswith("not proven")


def test_samples_left_out_twice_are_told() -> None:
    assert prove((FIRST,), (range(8, 12), range(10, 14)), None).faults == ["samples 10 to 11 are left out twice"]


@pytest.mark.parametrize("content", ["nonsense", '{"consumed_samples": 4}', '["iteration"]', "3"])
def test_what_is_no_metrics_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics").write_text(content)
    with pytest.raises(DataError, match="is no metrics file"):
        prove((FIRST,), (), tmp_path / "metrics")
    with pytest.raises(DataError, match="cannot be read"):
        prove((FIRST,), (), tmp_path / "nowhere")


def test_a_ledger_goes_on_where_the_checkpoint_ended() -> None:
    run = parse("--global-batch-size 4", ranks=2)
    first = lengthened((), run, 10)
    assert first == (Stretch(0, 10, 0, 40, 4, LAYOUT, first[0].stream),)
    assert read_ledger({"ledger": as_entries(first)}, "ck") == first
    larger = replace(run, train=replace(run.train, global_batch_size=8, samples_ahead=-40))
    both = lengthened(first, larger, 15)
    assert both == (first[0], Stretch(10, 15, 40, 80, 8, LAYOUT, first[0].stream))
    assert lengthened(both, larger, 15) == both, "nothing was made yet"
    back = lengthened(both, larger, 12)
    assert back == (first[0], Stretch(10, 12, 40, 56, 8, LAYOUT, first[0].stream)), "a return to before the start"
    assert lengthened(first, parse("--seed 7"), 20)[1].stream != first[0].stream


def test_a_checkpoint_without_a_ledger_says_little() -> None:
    (stretch,) = read_ledger({"iteration": 5, "consumed_samples": 20}, "ck")
    assert (stretch.last, stretch.end_place, stretch.global_batch_size) == (5, 20, 0)
    broken = as_entries((replace(FIRST, last="x"),))
    for ledger in ([{"iterations": 5}], 3, broken, as_entries((replace(FIRST, layout=[1]),))):
        with pytest.raises(CheckpointError, match="ck has a ledger of samples that cannot be read"):
            read_ledger({"ledger": ledger}, "ck")
