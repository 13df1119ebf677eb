"""A checkpoint that several tools are tried on."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support.evaluating import load_tool
from support.programs import Programs
from support.training import RankTraining

from megatron.tools.command_line import run_tool


class Ended(NamedTuple):
    """How a tool ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Ended]:
    """``tool("report", *words)``: ``tools/report.py`` in this process, without the imports of a new one."""

    def run(name: str, *words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            run_tool(load_tool(name).main)
        return Ended(left.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A ``vocab.json`` of four words: a, b, c and d are 0 to 3, an unknown one is 4, a document ends with 5."""
    (path := tmp_path / "vocab.json").write_text(
        json.dumps({word: number for number, word in enumerate(["a", "b", "c", "d", "<unk>", "<|endoftext|>"])})
    )
    return path


@pytest.fixture(scope="session")
def trained(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, from a few iterations at tensor parallel 2 x pipeline 2, ZeRO 1. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    settings = "--train-iters 3 --batch-size 4 --gas 1 --eval-iters 0".split()
    layout = "--model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1".split()
    train_in_ranks(4, *settings, *layout, "--save", folder)
    return folder


@pytest.fixture(scope="session")
def merged(programs: Programs, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``trained`` in one file, as tools/convert_checkpoint.py brings them together."""
    file = tmp_path_factory.mktemp("merged") / "one.safetensors"
    programs.warm(1, "tools/convert_checkpoint.py", "merge", trained, "--output", file).ok()
    return file


@pytest.fixture(scope="session")
def exported(programs: Programs, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trained`` as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    programs.warm(1, "tools/convert_checkpoint.py", "to-hf", trained, "--output", folder).ok()
    return folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained checkpoint to spoil."""
    return shutil.copytree(trained, tmp_path / "copy")
