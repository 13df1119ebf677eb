"""How the code is kept: its floors and its style."""

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.mark.parametrize("command", [["lint-imports"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]])
def test_the_house_rules_hold(programs, command):
    """The floors of pyproject.toml, ruff's rules and its format."""
    finished = subprocess.run([BIN / command[0], *command[1:]], cwd=programs.root, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
