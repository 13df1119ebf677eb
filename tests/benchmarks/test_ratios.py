"""Variants take turns, and ratios of known times are right in tables, in JSON and in the documentation."""

import json

import pytest

from benchmarks.comparing import Comparison, Quantity, Times, alternate
from benchmarks.tables import as_json, goals, markdown, read_json, row
from benchmarks.write_figures import with_figures
from megatron.common.errors import ConfigError

FASTER = Comparison(
    "step A: 6 layers", "bare torch", Times([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]), Times([2.0, 2.0, 2.0], [3.0, 3.0, 3.0]),
    1000, "tokens", 1.05,
)  # fmt: skip
SMALLER = Quantity("TP 2, states: tiny", "the planner", [90e6], [100e6], "B", least=0.98, most=1.02)
SOONER = Quantity("search: all", "a second", [0.25, 0.75], [1.0, 1.0], "s", most=1.0)
TO_BE_READ = Quantity("search: all", "import torch", [0.5], [2.0], "s")


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
    assert (r.ratio, r.spread, r.by_cpu, r.goal, r.is_reached) == (1.0, "0.50 to 2.00", "3.00", "at least 1.05", False)
    assert (r.ours, r.theirs) == ("500 tokens/s", "500 tokens/s")


def test_quantities_are_held_to_bounds() -> None:
    small, soon, read = map(row, (SMALLER, SOONER, TO_BE_READ))
    assert (small.ours, small.theirs, small.ratio, small.goal) == ("90 MB", "100 MB", 0.9, "0.98 to 1.02")
    assert (soon.ours, soon.theirs, soon.ratio, soon.goal) == ("500 ms", "1 s", 0.5, "at most 1.00")
    assert (small.is_reached, soon.is_reached, read.is_reached, read.goal) == (False, True, None, "")


def test_a_table_has_a_line_for_each_result() -> None:
    lines = markdown([row(FASTER), row(SOONER)]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[3] == "| search: all | a second | 500 ms | 1 s | **0.50** (0.25 to 0.75) |  | at most 1.00 |"


def test_goals_are_grouped_by_peer() -> None:
    rows = [row(result) for result in (FASTER, FASTER, SMALLER, TO_BE_READ)]
    assert goals("x", rows) == [
        "| x | bare torch | at least 1.05 | step A **1.00**; step A **1.00** | 0 of 2 |",
        "| x | the planner | 0.98 to 1.02 | TP 2, states **0.90** | no |",
    ]


def test_many_results_of_a_goal_are_a_range_and_the_missed_ones() -> None:
    reached = row(FASTER)._replace(ratio=1.2, is_reached=True)
    missed = reached._replace(ratio=0.9, is_reached=False, what="step B: 2 layers")
    limit = missed._replace(peer="its operators", ratio=0.95, goal="", least=None, is_reached=None, is_limit=True)
    named_twice = missed._replace(what="step A: 2 layers", ratio=0.8)
    of_all = "| x | bare torch | at least 1.05 |"
    assert goals("x", [*[reached] * 9, missed]) == [
        f"{of_all} 10 workloads, **0.90** to **1.20**; step B **0.90** | 9 of 10 |"
    ]
    assert goals("x", [*[reached] * 9, missed, limit, named_twice]) == [
        f"{of_all} 11 workloads, **0.80** to **1.20**; step B **0.90** (limit 0.95); step A: 2 layers **0.80** | "
        "9 of 11, 1 at the limit |"
    ]


def limited(ours: float, limit: float) -> list[str]:
    """The line of goals of a save that takes ``ours`` seconds, held to 1 s, beside a limit of ``limit`` seconds."""
    work = Times([ours], [ours])
    goal = Comparison("save: a file", "raw bytes", work, Times([1.0], [1.0]), 1, "files", 0.85)
    bare = Comparison("save: a file", "SHA-256", work, Times([limit], [limit]), 1, "files", is_limit=True)
    other = Comparison("load: a file", "nothing", work, Times([9.0], [9.0]), 1, "files", is_limit=True)
    rows = [row(result) for result in (goal, bare, other)]
    assert markdown(rows).splitlines()[3].startswith("| save: a file | limit: SHA-256 |")
    return goals("checkpoints", rows)


@pytest.mark.parametrize(
    ("ours", "limit", "reached"),
    [
        (2.0, 1.92, "save **0.50** (limit 0.52) | at the limit"),
        (2.0, 1.6, "save **0.50** (limit 0.62) | no"),  # too far from it
        (1.2, 1.17, "save **0.83** (limit 0.85) | no"),  # the limit reaches the goal
        (1.1, 1.09, "save **0.91** | yes"),
    ],
)
def test_a_missed_goal_is_held_to_the_limit_of_its_workload(ours: float, limit: float, reached: str) -> None:
    assert limited(ours, limit) == [f"| checkpoints | raw bytes | at least 0.85 | {reached} |"]


def test_limits_of_seconds_are_least_amounts() -> None:
    stall = Quantity("stall: all", "a save", [0.14], [1.0], "s", most=0.1)
    rows = [row(stall), row(Quantity("stall: all", "copying", [0.14], [0.134], "s", is_limit=True))]
    assert goals("x", rows) == ["| x | a save | at most 0.10 | stall **0.14** (limit 0.13) | at the limit |"]
    assert markdown(rows).splitlines()[2].endswith("| at most 0.10; at the limit 0.13 |")


def test_json_is_read_back_and_has_every_round(tmp_path) -> None:
    file = tmp_path / "x.json"
    file.write_text(as_json("x", 3, [FASTER, SOONER]))
    name, measured_on, rows = read_json(file)
    assert (name, rows) == ("x", [row(FASTER), row(SOONER)])
    assert "3 rounds" in measured_on and "torch " in measured_on
    assert json.loads(file.read_text())["rows"][0]["measured"]["ours"]["wall"] == [1.0, 2.0, 4.0]


MARKED = """before
<!-- goals -->
| benchmark | compared with | goal | measured | reached |
|---|---|---|---|---|
| engines | plain loop | at least 0.97 | ZeRO 0 **0.98** | yes |
| planner | a second | at most 1.00 | search **2.00** | no |
<!-- /goals -->
between
<!-- planner -->
old
<!-- /planner -->
behind
"""


def test_figures_replace_their_marks_in_the_documentation() -> None:
    text = with_figures(MARKED, {"planner": ("a machine", [row(SOONER)])})
    assert "old" not in text and "search **2.00**" not in text
    assert "<!-- planner -->\nMeasured on: a machine.\n\n| workload |" in text
    assert "| engines | plain loop | at least 0.97 | ZeRO 0 **0.98** | yes |\n| planner | a second |" in text
    assert all(line in text.splitlines() for line in ("before", "between", "behind"))
    assert with_figures(text, {"planner": ("a machine", [row(SOONER)])}) == text


def test_a_missing_mark_is_named() -> None:
    with pytest.raises(ConfigError, match="no marks for engines: put <!-- engines -->"):
        with_figures(MARKED, {"engines": ("a machine", [row(FASTER)])})
