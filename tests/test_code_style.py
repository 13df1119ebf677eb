"""Static checks of the code: import contracts of pyproject.toml, ruff's rules and format, and mypy's types."""

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
