"""tools/plot_recovery.py: a picture of an elastic run from what its supervisor has recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST = {"hosts": ["host-1", "host-2"], "began": 1.0, "ended": 33.0, "events": {"chosen": 1.0, "trained": 9.0}}
EVENTS = dict(zip(("noticed", "ended", "examined", "chosen"), (30.0, 33.0, 34.5, 35.0), strict=True))
EVENTS |= dict(zip(("launched", "joined", "loaded", "trained"), (36.0, 40.0, 42.0, 43.0), strict=True))
SECOND = {"hosts": ["host-1"], "began": 35.0, "ended": 60.0, "events": EVENTS}


def plot(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "plot_recovery.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


def test_a_recovery_in_a_picture(tmp_path: Path) -> None:
    (tmp_path / "elastic.jsonl").write_text("".join(json.dumps(start) + "\n" for start in (FIRST, SECOND)))
    drawn = plot(tmp_path, "--output", tmp_path / "x.svg", "--fault", "host-2=28.5")
    assert drawn.stdout.startswith("training again 13.0 s after the failure was noticed: 3.0 s to end all ranks, 1.5 s")
    picture = (tmp_path / "x.svg").read_text()
    texts = ("host-1", "host-2", "supervisor", "13.0 s", "host-2 fails", "census", "training", "until it is noticed")
    assert all(f"<!-- {text} -->" in picture for text in texts)


def test_the_bars_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from plot_recovery import bars

    drawn = [(bar.row, bar.what, bar.begin, bar.end) for bar in bars([FIRST, SECOND])]
    assert ("host-2", "training", 9.0, 30.0) in drawn, "to the failure, not to the end of its processes"
    assert ("supervisor", "census", 33.0, 34.5) in drawn and ("host-1", "launcher", 35.0, 36.0) in drawn
    assert ("host-1", "training", 43.0, 60.0) in drawn
    assert not [bar for bar in drawn if bar[0] == "host-2" and bar[2] > 30]


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("", [], "lists no start with its events"),
        ("{", [], "cannot be read"),
        (None, [], "cannot be read"),
        ("", ["--fault", "host-2"], "--fault host-2: give HOST=TIME"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, monkeypatch, capsys, content, flags, message) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plot_recovery

    from megatron.common.errors import ConfigError

    if content is not None:
        (tmp_path / "elastic.jsonl").write_text(content)
    monkeypatch.setattr(sys, "argv", ["plot_recovery.py", str(tmp_path), "--output", "x.svg", *flags])
    if flags:
        (tmp_path / "elastic.jsonl").write_text(json.dumps(FIRST))
    with pytest.raises(ConfigError, match=message):
        plot_recovery.main()
