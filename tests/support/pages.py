"""The commands of the documentation: each line of a ```bash block, as a shell reads it; and the help of a program."""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from support.warm import exit_code, start

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SEPARATORS = ("&&", "|", ";", ">", "<", "<<")


class Command(NamedTuple):
    """A command of a page."""

    page: str
    line: int
    variables: dict[str, str]
    """What is assigned in front of it."""
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def text(self) -> str:
        """The command as one line."""
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])


def commands_in_blocks(page: Path) -> list[Command]:
    """The commands of the ```bash blocks of a page."""
    text, found = page.read_text(), []
    for block in re.finditer(r"^ *```bash\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        first = text[: block.start(1)].count("\n") + 1
        for line, command in _lines(block[1]):
            found += [
                Command(page.relative_to(ROOT).as_posix(), first + line, *_assignments(words))
                for words in words_of(command)
            ]
    return found


def words_of(line: str) -> Iterator[list[str]]:
    """The words of each command of a line."""
    words = shlex.split(line, comments=True)
    while words:
        end = next((place for place, word in enumerate(words) if word in SEPARATORS), len(words))
        yield words[:end]
        words = words[end + 1 :]


@cache
def help_of(program: str | Path, *words: str) -> str:
    """What ``PROGRAM WORDS --help`` prints in long lines, in a process that has torch already."""
    environ = os.environ | {"COLUMNS": "1000", "DS_ACCELERATOR": "cpu", "NO_COLOR": "1"}
    with tempfile.NamedTemporaryFile() as log:
        process = start([program, *words, "--help"], environ, ROOT, Path(log.name))
        code = exit_code([process], time_limit=240)
        text = Path(log.name).read_text()
    assert code == 0, f"{program}:\n{text}"
    return text


def _lines(block: str) -> Iterator[tuple[int, str]]:
    """Each command line with its number, joined with those that it continues on."""
    lines = block.splitlines()
    number = 0
    while number < len(lines):
        first, text = number, lines[number]
        while text.endswith("\\"):
            number += 1
            text = f"{text[:-1]} {lines[number].strip()}"
        number += 1
        yield first, text


def _assignments(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What is assigned in front of a command, and the command."""
    count = next((n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), tuple(words[count:])
