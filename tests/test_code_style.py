"""Static checks of the code: import contracts of pyproject.toml, ruff's rules and format, and mypy's types."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


COMMANDS = [["lint-imports"], ["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_static_checks_pass(programs, command):
    finished = subprocess.run([BIN / command[0], *command[1:]], cwd=programs.root, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_one_module_calls_torch_cuda() -> None:
    """All other code reaches the device through DeepSpeed's accelerator, whichever that is."""
    root = Path(__file__).resolve().parents[1]
    files = [file for folder in ("megatron", "tools", "tasks") for file in (root / folder).rglob("*.py")]
    calls = re.compile(r"\btorch\.cuda\b(?!`)|\bfrom torch import .*\bcuda\b|\.cuda\(\)")
    callers = {str(file.relative_to(root)) for file in (*files, *root.glob("*.py")) if calls.search(file.read_text())}
    assert callers == {"megatron/training/memory.py"}
