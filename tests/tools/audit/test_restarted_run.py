"""A blend through a stop, a broken checkpoint and another layout: what training did, and what the audit reports.

And sample histories with gaps or overlaps.
"""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from audit.conftest import Restarted
from support.command_lines import parse
from support.programs import read_metrics

from megatron.checkpoint.sample_history import Segment, extended, read_history
from megatron.common.errors import DataError
from megatron.config.batch_schedule import BatchSchedule
from megatron.data.loader import MicroBatches
from megatron.tools.audit.case import Case, open_case
from megatron.tools.audit.proof import as_text, prove
from megatron.tools.audit.samples import batch_of, seen_up_to


@pytest.fixture
def case(restarted: Restarted) -> Case:
    return open_case(restarted.checkpoints, {})


def test_proof_of_a_restarted_run(restarted: Restarted, case: Case, tmp_path: Path) -> None:
    found = prove(case.history, case.saved.skipped_samples, restarted.metrics)
    assert found["faults"] == [] and found["logged"] == 6 and found["made_again"] == [[3, 4]]
    names = ("finished", "last", "first_place", "end_place")
    assert [[part[name] for name in names] for part in found["stretches"]] == [[0, 2, 0, 8], [2, 6, 8, 24]]
    assert [part["layout"]["DP"] for part in found["stretches"]] == [2, 1]
    lines = [line for line in read_metrics(restarted.metrics) if "consumed_samples" in line]
    lines[-1]["consumed_samples"] += 4
    (tmp_path / "metrics").write_text("\n".join(map(json.dumps, lines)))
    (error,) = prove(case.history, (), tmp_path / "metrics")["faults"]
    assert error == f"{tmp_path}/metrics:8: 28 samples after iteration 6, but 24 in the checkpoint"


@pytest.mark.parametrize(("iteration", "rank", "data_rank", "ranks"), [(2, 1, 1, 2), (2, 0, 0, 2), (5, 0, 0, 1)])
def test_a_batch_is_that_of_the_loader(case: Case, iteration: int, rank: int, data_rank: int, ranks: int) -> None:
    batch = batch_of(case, iteration, rank)
    loader = MicroBatches(
        case.training_samples(24), sizes=BatchSchedule(((0, 4),)), micro_batch_size=1, data_rank=data_rank,
        data_size=ranks,
    )  # fmt: skip
    read = [loader[n][0].tolist() for n in range(4 // ranks * (iteration - 1), 4 // ranks * iteration)]
    report = [" ".join(piece["text"] for piece in row["pieces"]) for row in batch["samples"]]
    assert [case.tokenizer.tokenize(text.replace("<|endoftext|>", "")) for text in report] == [
        [token for token in tokens if token != case.tokenizer.eod] for tokens in read
    ]
    assert [row["sample"] for row in batch["samples"]] == list(
        range(4 * (iteration - 1), 4 * iteration)[data_rank * 4 // ranks :][: 4 // ranks]
    )
    whole = batch_of(case, iteration, None)
    assert [row for row in whole["samples"] if row["data_rank"] == data_rank] == batch["samples"]


@pytest.mark.parametrize(("iteration", "skipped"), [(1, []), (6, []), (5, [[3, 5], [9, 10]])])
def test_seen_samples_equal_those_of_the_batches(case: Case, iteration: int, skipped: list[list[int]]) -> None:
    saved = replace(case.saved, description={**case.saved.description, "left_out_samples": skipped})
    case = replace(case, saved=saved)
    numbers = [row["sample"] for made in range(1, iteration + 1) for row in batch_of(case, made, None)["samples"]]
    gone = sum(stop - start for start, stop in skipped)
    assert len(numbers) == 4 * iteration and max(numbers) == 4 * iteration + gone - 1
    samples = case.training_samples(max(numbers) + 1)
    counted: Counter[tuple[str, int]] = Counter()
    for number in numbers:
        *others, last = samples.spans(number)
        # The last token of a sample is there to be predicted; it is an input of the next one.
        for span in (*others, last._replace(stop=last.stop - 1)):
            counted[span.indexed.prefix, span.document] += span.stop - span.start
    found = list(seen_up_to(case, iteration))
    report = {
        (seen.prefix, seen.first_document + number): int(tokens)
        for seen in found
        for number, tokens in enumerate(seen.tokens)
        if tokens
    }
    assert report == {key: tokens for key, tokens in counted.items() if tokens}
    assert sum(seen.tokens.sum() for seen in found) == 4 * iteration * 32


LAYOUT = {"PP": 1, "DP": 2, "SP": 1, "TP": 1}
FIRST = Segment(0, 10, 0, 40, 4, LAYOUT, "a")
SECOND = Segment(10, 15, 40, 80, 8, {**LAYOUT, "DP": 1}, "a")


def test_segments_that_join_are_proven(tmp_path: Path) -> None:
    found = prove((FIRST, SECOND), (range(8, 12),), None)
    assert found["faults"] == [] and (found["iterations"], found["samples"], found["logged"]) == (15, 80, None)
    text = "\n".join(as_text(found, tmp_path))
    assert "samples 8 to 11" in text and text.endswith("proven: no sample was repeated, no other was skipped")


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


@pytest.mark.parametrize(
    "content",
    [
        "nonsense",
        '{"consumed_samples": 4}',
        '["iteration"]',
        '{"iteration": 1, "consumed_samples": "8"}',
    ],
)
def test_invalid_metrics_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics").write_text(content)
    with pytest.raises(DataError, match="metrics:1: .*not "):
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
