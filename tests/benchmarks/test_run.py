"""benchmarks/run.py measures, writes its figures, and reports mistakes; ratios of known times are right."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import compare, write_figures
from benchmarks.comparing import Comparison, Quantity, Times, alternate
from benchmarks.measures import planner
from benchmarks.measures.shapes import Shape
from benchmarks.run import MEASURES, main
from benchmarks.tables import row
from megatron.common.errors import ConfigError

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


@pytest.mark.parametrize("name", MEASURES)
def test_every_measurement_finds_what_it_measures(name: str) -> None:
    assert callable(import_module(f"benchmarks.measures.{name}").measure)


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (main, "engine", "there is no measurement engine: choose from training_step, "),
        (main, "training_step --sizes D", "--sizes D: training_step has A, B, C"),
        (compare.main, "HEAD HEAD planner --turns 0", "--turns and --rounds must be"),
        (write_figures.main, "docs", "docs has no figures: make them with"),
    ],
)
def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch, program, words: str, message: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["x.py", *words.split()])
    with pytest.raises(ConfigError, match=message):
        program()


TINY = Shape(layers=1, hidden=32, heads=2, sequence=16, batch=1, vocabulary=128)


def test_checkpoints_are_compared_and_leave_no_files(run_ranks_once, tmp_path: Path) -> None:
    (peers,) = run_ranks_once(1, measure_checkpoints, str(tmp_path))
    assert peers == {
        "save": {"raw bytes and fsync", "safetensors and fsync", "torch.save and fsync"},
        "load": {"safetensors", "torch.load"},
        "--async-save": {"a synchronous save"},
        "--snapshot-interval": {"a synchronous save"},
    }
    assert list(tmp_path.glob("tmp*")) == []


def measure_checkpoints(folder: str) -> dict[str, set[str]]:
    import tempfile

    from benchmarks.measures import checkpoints

    tempfile.tempdir, checkpoints.SHAPE = folder, TINY
    peers: dict[str, set[str]] = {}
    for result in checkpoints.measure(1):
        peers.setdefault(result.what.partition(":")[0], set()).add(result.peer)
        assert all(ratio > 0 for ratio in result.ratios)
    return peers


def test_generation_makes_the_same_text_in_every_way(run_ranks_once) -> None:
    (found,) = run_ranks_once(1, measure_generation)
    assert [peer for peer, _ in found] == ["transformers", "the suite with --recompute"]
    assert all(ratio > 0 for _, ratio in found)


def measure_generation() -> list[tuple[str, float]]:
    from benchmarks.measures import generation

    generation.SIZES = (generation.Size(layers=1, hidden=32, vocabulary=300, new=4, batches=(2,)),)
    return [(result.peer, result.ratios[0]) for result in generation.measure(1)]


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


def test_figures_replace_their_marks_in_the_documentation() -> None:
    page = "before\n<!-- planner -->\nold\n<!-- /planner -->\nbehind\n"
    found = {"planner": ("a machine", [row(SOONER)])}
    text = write_figures.with_figures(page, found)
    assert text.startswith("before\n<!-- planner -->\nMeasured on: a machine.\n\n| workload |")
    assert "old" not in text and text.endswith("|\n<!-- /planner -->\nbehind\n")
    assert write_figures.with_figures(text, found) == text
    with pytest.raises(ConfigError, match="no marks for engines: put <!-- engines -->"):
        write_figures.with_figures(page, {"engines": ("a machine", [row(FASTER)])})
