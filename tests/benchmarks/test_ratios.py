"""Variants take turns, and ratios of known times are right in tables, in JSON and in the documentation."""

import json

import pytest

from benchmarks.comparing import Comparison, Quantity, Times, alternate
from benchmarks.tables import as_json, markdown, read_json, row
from benchmarks.write_figures import with_figures
from megatron.common.errors import ConfigError

FASTER = Comparison(
    "step A: 6 layers", "bare torch", Times([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]), Times([2.0, 2.0, 2.0], [3.0, 3.0, 3.0]),
    1000, "tokens",
)  # fmt: skip
SOONER = Quantity("search: all", "import torch", [0.25, 0.75], [1.0, 1.0], "s")


def test_variants_take_turns() -> None:
    said: list[str] = []
    times = alternate(
        {name: lambda name=name: said.append(name) for name in "abc"}, 3, warm_up=1, settle=lambda: said.append("|")
    )
    assert "".join(said).replace("||", "|") == "|c|a|b|a|b|c|b|c|a|c|a|b|"
    assert all(len(each.wall) == len(each.cpu) == 3 for each in times.values())


def test_speeds_are_compared_round_by_round() -> None:
    """The suite's 1, 2 and 4 s beside 2 s each: the median of the ratios, not the ratio of anything else."""
    assert FASTER.ratios == [2.0, 1.0, 0.5]
    r = row(FASTER)
    assert (r.ratio, r.spread, r.by_cpu) == (1.0, "0.50 to 2.00", "3.00")
    assert (r.ours, r.theirs) == ("500 tokens/s", "500 tokens/s")


def test_a_table_has_a_line_for_each_result() -> None:
    lines = markdown([row(FASTER), row(SOONER)]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[3] == "| search: all | import torch | 500 ms | 1 s | **0.50** (0.25 to 0.75) |  |"


def test_json_is_read_back_and_has_every_round(tmp_path) -> None:
    file = tmp_path / "x.json"
    file.write_text(as_json("x", 3, [FASTER, SOONER]))
    name, measured_on, rows = read_json(file)
    assert (name, rows) == ("x", [row(FASTER), row(SOONER)])
    assert "3 rounds" in measured_on and "torch " in measured_on
    assert json.loads(file.read_text())["rows"][0]["measured"]["ours"]["wall"] == [1.0, 2.0, 4.0]


def test_figures_replace_their_marks_in_the_documentation() -> None:
    page = "before\n<!-- planner -->\nold\n<!-- /planner -->\nbehind\n"
    found = {"planner": ("a machine", [row(SOONER)])}
    text = with_figures(page, found)
    assert text.startswith("before\n<!-- planner -->\nMeasured on: a machine.\n\n| workload |")
    assert "old" not in text and text.endswith("|\n<!-- /planner -->\nbehind\n")
    assert with_figures(text, found) == text
    with pytest.raises(ConfigError, match="no marks for engines: put <!-- engines -->"):
        with_figures(page, {"engines": ("a machine", [row(FASTER)])})
