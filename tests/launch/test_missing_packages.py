"""A required package that is not installed is one line with code 2, of a rank and of a tool."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.launch import rank

ROOT = Path(__file__).resolve().parents[2]
ADVICE = "is not installed: pip install -r requirements.txt\n"


@pytest.mark.parametrize(
    ("module", "package"), [("xxhash", "xxhash"), ("PIL.Image", "pillow"), ("yaml", "pyyaml"), ("torch", "torch")]
)
def test_a_rank_names_the_package(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py"])
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)  # an import then fails as if it were missing
    monkeypatch.setitem(sys.modules, module, None)
    assert rank._exit_code(lambda: importlib.import_module(module) and 0, 0, True) == 2
    assert capsys.readouterr().err == f"pretrain_gpt2.py: error: the package {package} {ADVICE}"


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("DS_ACCELERATOR", "XPU_Accelerator requires PyTorch with XPU support", "XPU_Accelerator requires PyTorch"),
        ("TORCH_LOGS", "\nInvalid log settings: +x, must be a list\nValid settings:\nall", "Invalid log settings: +x,"),
        (
            "TORCH_DISTRIBUTED_DEBUG",
            "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.",
            "The value of",
        ),
    ],
)
def test_a_variable_that_a_library_refuses_is_named(
    variable: str, text: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise ValueError(text)

    monkeypatch.setenv(variable, "x")
    assert rank._exit_code(refuse, 0, True) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: environment variable {variable}=x: {problem}" in line and line.endswith("; correct or unset it")


def test_what_is_not_required_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert rank._exit_code(lambda: importlib.import_module("no_such_package") and 0, 0, True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same moment come before or after it, also with python -u."""
    writes = list[str]()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    assert rank._exit_code(lambda: open("x" * 300) and 0, 0, True) == 2
    assert len(list(filter(None, writes))) == 1 and writes[0].endswith("\n")


def test_a_name_that_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert rank._exit_code(lambda: open("x" * 300) and 0, 0, True) == 2
    assert capsys.readouterr().err.endswith(f"error: {'x' * 40}…: File name too long; name another file\n")


@pytest.mark.parametrize(
    ("program", "package", "arguments"),
    [
        ("pretrain_gpt2.py", "xxhash", "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --explain"),
        ("tools/preprocess_data.py", "numpy", "--help"),  # which it imports before main() is called
    ],
)  # fmt: skip
def test_a_program_names_the_package(program: str, package: str, arguments: str) -> None:
    script = (
        "import os, runpy, sys; del sys.argv[0]; sys.modules[sys.argv.pop(0)] = None; "
        "sys.path[0] = os.path.dirname(sys.argv[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    words = [sys.executable, "-c", script, package, str(ROOT / program), *arguments.split()]
    ended = subprocess.run(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"{Path(program).name}: error: the package {package} {ADVICE}")
