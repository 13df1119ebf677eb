"""The notebook of the lab: its cells run in their order, as in Jupyter, and show what the lab promises."""

import json

import matplotlib
import pytest
from support.pages import ROOT


def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
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
