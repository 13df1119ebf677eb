"""The notebook of the lab: its cells run in their order, as in Jupyter, and show what the lab promises."""

import json
from types import SimpleNamespace
from typing import Any

import matplotlib
import pytest
from support.pages import ROOT
from support.programs import Programs


def test_the_cells_of_the_notebook_run(
    programs: Programs, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that it starts run in processes that have torch already."""

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        _, *words = command
        if words[0] == "tools/verify_layout.py":
            words = ["tests/support/verify_layout.py", *words[1:]]
        elif words[0] == "-m":
            words = ["tests/support/verify_layout.py", *words]
        return SimpleNamespace(stdout=programs.warm(1, *words).output)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    matplotlib.use("agg")
    names: dict = {}
    for cell in json.loads((ROOT / "docs" / "tutorials" / "lab.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    for text in ("4 groups of 2: [0 1] [2 3]", "4 of 4 layouts agree", "ZeRO 3: ", "row averaged: attributed"):
        assert text in shown, shown
