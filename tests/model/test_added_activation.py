"""The page's patch that adds an activation, on a copy of the project."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.pages import ROOT
from support.programs import TINY_MODEL, Programs, read_metrics
from support.training import RankTraining


@pytest.fixture(scope="module")
def patched(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The programs of a copy with the patch."""
    folder = tmp_path_factory.mktemp("patched")
    for name in ("megatron", "tools"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pretrain_gpt2.py", folder)
    page = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    for patch in re.findall(r"```diff\n(.*?)```", page, re.DOTALL):
        subprocess.run(["git", "apply", "--recount", "-C1", "-"], cwd=folder, input=patch, text=True, check=True)
    copy = Programs(folder, programs.folder)
    copy.__dict__["data_arguments"] = programs.data_arguments
    return copy


def test_it_trains_is_checked_and_is_not_exported_as_another(
    patched: Programs, train_in_ranks: RankTraining, tmp_path: Path
) -> None:
    saved, files = tmp_path / "checkpoint", (tmp_path / "relu.jsonl", tmp_path / "gelu.jsonl")
    words = ("pretrain_gpt2.py", *TINY_MODEL, *patched.data_arguments, "--batch-size", "1", "--train-iters", "2")
    patched.python(*words, "--relu", "--save", saved, "--metrics-file", files[0]).ok()
    train_in_ranks(1, "--batch-size", "1", "--train-iters", "2", "--metrics-file", files[1])  # of this project
    relu, gelu = ([line["lm_loss"] for line in read_metrics(file) if "lm_loss" in line] for file in files)
    assert len(relu) == 2 and relu != gelu

    resumed = patched.python(*words, "--load", saved)
    assert resumed.returncode == 4 and "activation" in resumed.output, resumed.output
    exported = patched.python("tools/convert_checkpoint.py", "to-hf", saved, "--output", tmp_path / "hf")
    assert exported.returncode == 2 and "--relu" in exported.output, exported.output
    assert not (tmp_path / "hf").exists()
