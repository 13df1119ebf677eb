"""tools/report.py: a self-contained page; an unreadable file is one line and exit code 3."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.command_lines import parse
from support.timelines import by_theory

from megatron.tools.reporting.files import to_json, write_record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run of two stages leaves in --run-dir, with its trace."""
    lines = [{"iteration": n, "lm_loss": 5 / n, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 2e4,
              "memory_gb": 1.5, "seconds_per_iteration": 0.25} for n in range(1, 2001)]  # fmt: skip
    lines.append({"iteration": 2000, "validation_loss": 2.5})
    for n, line in enumerate(lines):  # the first of two experts gets more and more
        line |= {"layer_2/expert_0_load": 1 + n / 2000, "layer_2/expert_1_load": 1 - n / 2000}
    lines[0] |= {f"layer_{'9' * 5000}/expert_0_load": 1, "layer_2/expert_2_load": 10**400}  # cannot be drawn
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = parse(f"--pipe-parallel-size 2 --run-dir {tmp_path} --data-path <b>corpus</b>", ranks=2)
    write_record(replace(run, model=replace(run.model, vocab_size=90, padded_vocab_size=128)), "cpu")
    (tmp_path / "trace.json").write_text(to_json(by_theory()))
    return tmp_path


class _Page(HTMLParser):
    """Whatever a page would load, and its elements' balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        links = [(name, value) for name, value in attributes if name in ("src", "href", "xlink:href", "data")]
        self.loads += [f"{tag} {name}" for name, value in links if not str(value).startswith("#")]
        self.loads += [tag] * (tag in ("script", "link", "iframe", "object"))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "h2":
            self.headings.append(data)


def test_report_is_self_contained(tool: Callable, folder: Path) -> None:
    finished = tool("report", folder)
    assert finished.returncode == 0, finished.stderr
    text = (folder / "report.html").read_text()
    page = _Page(text)
    assert page.loads == [] and not re.search(r"url\((?!#)", text) and "@import" not in text
    assert page.headings == [
        "Result", "Curves", "Experts", "Layout", "Plan against measurement", "Schedule", "Environment", "Configuration"
    ]  # fmt: skip
    cells = re.findall("fill: (#.{6})", text.partition('id="QuadMesh_1"')[2].partition("</g>")[0])
    middle = len(cells) // 2
    assert [cells[index] for index in (0, middle - 1, middle, -1)] == ["#f7f7f7", "#67001f", "#f7f7f7", "#053061"], (
        "white is an equal share, red twice that, and blue none"
    )
    titles = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Memory of rank 0"]
    assert [title for title in re.findall("<text [^>]*>([^<]*)", text) if title in titles] == titles
    curves = text.partition("<h2>Curves</h2>")[2].partition("<h2>")[0]
    assert len(re.findall(r'<g id="axes_\d+">', curves)) == len(titles), "no other curves"
    for words in (
        "0.0025 at iteration 2,000", "2.5000 at iteration 2,000", "20,000 tokens/s", "2 processes = TP 1 x PP 2 x DP 1",
        "bubble 25.0% (theory: (p-1)/(m+p-1) = 25.0%)", "<th>torch</th>", "&lt;b&gt;corpus&lt;/b&gt;",
    ):  # fmt: skip
        assert words in text, words
    assert "train with" not in text and len(text) < 300_000
    planned = {name: re.findall("<td class='number'>(.*?)</td>", cells)
               for name, cells in re.findall("<tr><th>([^<]*)</th>(<td class='number'>.*?)</tr>", text)}  # fmt: skip
    assert planned["bubble"] == ["25.0%", "25.0%"] and planned["passes of stage 1"][1] == "50.0%"
    assert planned["memory of rank 0"][1] == "1.5 GB, of the entire process"
    assert re.fullmatch(r"[\d.]+ ms", planned["step"][0]) and planned["step"][1] == "250 ms"


def test_a_run_that_resumed_on_another_layout_shows_both(tool: Callable, folder: Path) -> None:
    def resume(flags: str, resumed_after: int) -> list[tuple[str, str]]:
        run = parse(f"--run-dir {folder} --data-path corpus {flags}", ranks=2)
        run = replace(run, train=replace(run.train, resumed_after=resumed_after))
        write_record(replace(run, model=replace(run.model, vocab_size=90, padded_vocab_size=128)), "cpu")
        assert tool("report", folder).returncode == 0
        return re.findall(r"<td class='number'>([\d,]+)</td><td>([^<]*) x DP", (folder / "report.html").read_text())

    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 2001, "lm_loss": 1, "seconds_per_iteration": 0.5, "memory_gb": 1}\n')
    pipeline, tensor = "2 processes = TP 1 x PP 2", "2 processes = TP 2 x PP 1"
    assert resume("--pipe-parallel-size 2", 1000) == []
    assert resume("--model-parallel-size 2", 2000) == [("1", pipeline), ("2,001", tensor)]
    plan = (folder / "report.html").read_text().partition("<h2>Plan against measurement</h2>")[2]
    assert "<td class='number'>500 ms</td>" in plan and "<td class='number'>1 GB," in plan, "of the last layout"
    assert resume("", 1500) == [("1", pipeline), ("1,501", "2 processes = TP 1 x PP 1")]
    assert resume("", 0) == []


@pytest.mark.parametrize("change", [{"stages": [[1]]}, {"config": {"logging": ["x"]}}])
def test_unreadable_file_is_a_one_line_error(tool: Callable, folder: Path, change: dict) -> None:
    write_record(parse(f"--run-dir {folder} --data-path corpus"), "cpu")
    (folder / "run.json").write_text(json.dumps({**json.loads((folder / "run.json").read_text()), **change}))
    finished = tool("report", folder)
    assert finished.returncode == 3
    assert finished.stderr.startswith("report.py: error: ") and "run.json: not a record of a run" in finished.stderr
    assert finished.stderr.count("\n") == 1 and not (folder / "report.html").exists()


def test_metrics_may_be_in_a_file_of_their_own(tool: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    elsewhere = (folder / "metrics.jsonl").rename(folder.parent / "own.jsonl")
    write_record(parse(f"--run-dir {folder} --metrics-file own.jsonl --data-path corpus"), "cpu")
    assert tool("report", folder).returncode == 0
    assert "2.5" in (folder / "report.html").read_text()
    content = elsewhere.read_bytes()
    assert tool("report", folder, "--output", "own.jsonl").returncode == 2 and elsewhere.read_bytes() == content
    for damage in (lambda: elsewhere.write_text("x\n"), elsewhere.unlink):
        damage()
        ended = tool("report", folder)
        assert ended.returncode == 3 and "own.jsonl" in ended.stderr


@pytest.mark.parametrize("words", [["metrics.jsonl"], ["trace.json"], ["trace.json", "--trace", "{folder}"]])
def test_what_is_read_is_not_replaced(tool: Callable, folder: Path, words: list[str]) -> None:
    read = folder / words[0]
    content = read.read_bytes()
    ended = tool("report", folder, "--output", read, *(word.format(folder=folder) for word in words[1:]))
    assert (ended.returncode, ended.stderr) == (
        2,
        f"report.py: error: --output {read} is read for the page; name another file\n",
    )
    assert read.read_bytes() == content


@pytest.mark.parametrize("content", [None, "[1]", '{"image": 5, "question": "a"}', '{"question": "a"}', "7"])
def test_answers_that_are_none_are_not_read(tool: Callable, folder: Path, tmp_path: Path, content: str | None) -> None:
    file = Path("/dev/zero") if content is None else tmp_path / "answers.jsonl"
    if content is not None:
        file.write_text(f"{content}\n")
    ended = tool("report", folder, "--predictions", file)
    assert ended.returncode == 3 and str(file) in ended.stderr and len(ended.stderr.splitlines()) == 1
