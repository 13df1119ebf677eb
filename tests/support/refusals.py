"""Start pretrain_gpt2.py, or another program, with a mistake in it, and see how it ends."""

import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.command_lines import latest
from support.programs import TIME_LIMIT, TINY_MODEL

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "pretrain_gpt2.py: error: "
COMMAND = (
    *TINY_MODEL,
    *"--data-path tiny_text_document --split 8,1,1".split(),
    *"--vocab-file vocab.json --tokenizer-type WhitespaceTokenizer".split(),
    *"--batch-size 2 --train-iters 4 --eval-iters 1".split(),
)
"""A legal command line, in a folder with the tiny data set. Flags of a test replace those of the same name."""


def launched(rank: int, processes: int) -> dict[str, str]:
    """The environment that torchrun sets for a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def refusal(
    place: Path,
    words: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    program: str = "pretrain_gpt2.py",
    command: Sequence[str] = COMMAND,
) -> tuple[int, list[str]]:
    """The exit code, and what stands on the screen, of the legal ``command`` and ``words``, started in ``place``.

    A refusal is made of lines that begin as ours do. Torch was not imported before it, and nothing
    in ``place``, which is the home folder too, is another than before.
    """
    before = _contents(place)
    with tempfile.TemporaryDirectory() as answers:
        said, errors, modules = (Path(answers, name) for name in ("said", "errors", "modules"))
        code = _forked(
            words=[str(ROOT / program), *latest([*command, *shlex.split(words)])],
            environ={**os.environ, "HOME": str(place), "XDG_CACHE_HOME": str(place / "cache"), **(environ or {})},
            folder=str(place),
            log=str(said),
            errors=str(errors),
            modules=str(modules),
        )
        lines, imported = errors.read_text().splitlines(), set(modules.read_text().splitlines())
        assert said.read_text() == ""
    prefix = f"{Path(program).name}: error: "
    assert all(line.startswith(prefix) for line in lines), "\n".join(lines)
    assert "megatron.cli" in imported and not imported & {"torch", "deepspeed"}
    assert _contents(place) == before
    return code, [line.removeprefix(prefix) for line in lines]


def _forked(**request: Any) -> int:
    """The exit code of a program in a fork of a process that has imported no torch: a tenth of the time of a start."""
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answered, _, _ = select.select([server.stdout], [], [], TIME_LIMIT)
    assert answered, f"{request['words']} ran past {TIME_LIMIT} s"
    return int(server.stdout.readline())


@cache
def _server() -> subprocess.Popen:
    """It ends with this process, when its input does."""
    script = Path(__file__).with_name("fork_checks.py")
    return subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _contents(place: Path) -> dict[str, tuple]:
    """All that is in a folder: names, modes, times and bytes."""
    found = {}
    for path in (place, *place.rglob("*")):
        stat = path.lstat()
        found[str(path)] = (stat.st_mode, stat.st_mtime_ns, path.read_bytes() if path.is_file() else None)
    return found
