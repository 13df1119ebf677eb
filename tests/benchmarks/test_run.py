"""benchmarks/run.py measures, writes its figures, and reports mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.programs import Programs

from benchmarks import write_figures
from benchmarks.measures import planner
from benchmarks.run import MEASURES, main

ROOT = Path(__file__).parents[2]


def test_a_measurement_is_made_and_written_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The search of the planner, of a model and a machine that take it no time."""
    monkeypatch.setattr(planner, "SEARCH", "--model 345m --device a100 --devices 1 --global-batch-size 8")
    monkeypatch.setattr(sys, "argv", ["run.py", "planner", "--rounds", "1", "--json", str(tmp_path / "figures")])
    main()
    said = capsys.readouterr().out
    assert said.startswith("## planner\n") and "| search: tools/plan.py --model 345m" in said
    found = json.loads((tmp_path / "figures" / "planner.json").read_text())
    assert [len(entry["measured"]["ours"]) for entry in found["rows"]] == [1]
    page = tmp_path / "page.md"
    page.write_text("<!-- planner -->\n-\n<!-- /planner -->\n")
    monkeypatch.setattr(sys, "argv", ["write_figures.py", str(tmp_path / "figures"), "--into", str(page)])
    write_figures.main()
    assert page.read_text().count("| search: tools/plan.py --model 345m") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.py", "engine"], "run.py: error: there is no measurement engine: choose from training_step, "),
        (["run.py", "training_step", "--sizes", "D"], "run.py: error: --sizes D: training_step has A, B, C"),
        (["compare.py", "HEAD", "HEAD", "planner", "--turns", "0"], "compare.py: error: --turns and --rounds must be"),
        (["write_figures.py", "docs"], "write_figures.py: error: docs has no figures: make them with"),
    ],
)
def test_mistakes_are_one_line(programs: Programs, words: list[str], message: str) -> None:
    ended = programs.python(f"benchmarks/{words[0]}", *words[1:])
    assert ended.returncode == 2
    assert ended.output.startswith(message) and ended.output.count("\n") == 1


def test_every_measurement_has_its_place_in_the_documentation() -> None:
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert set(re.findall(r"<!-- (\w+) -->", text)) == {*write_figures.TABLES}
    for name in write_figures.TABLES:
        assert f"<!-- /{name} -->" in text and f"| `{name}` |" in text, f"{name} is not explained"
    for name in MEASURES:
        assert (ROOT / "benchmarks" / "measures" / f"{name}.py").exists()
