"""Fixtures of the tests of DeepSpeed configs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import complaints


@pytest.fixture
def config_file(tmp_path: Path):
    """Write a config, as text or as an object; the flag that names it."""

    def write(content: Any) -> str:
        file = tmp_path / "ds.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return f"--deepspeed_config {file}"

    return write


@pytest.fixture
def config_file_errors(config_file, tmp_path: Path):
    """The messages a config is refused with, less the path of its folder."""

    def find(content: Any, words: str = "", ranks: int = 1) -> list[str]:
        messages = complaints(f"{config_file(content)} {words}", ranks=ranks)
        return [message.replace(f"{tmp_path}/", "") for message in messages]

    return find
