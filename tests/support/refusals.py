"""Start pretrain_gpt2.py, or another program, with a mistake in it, and see how it ends."""

import ctypes
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.command_lines import latest
from support.programs import TINY_MODEL

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
    finished = subprocess.run(
        # Lists every module on stderr, as soon as it is there.
        [sys.executable, "-X", "importtime", str(ROOT / program), *latest([*command, *shlex.split(words)])],
        cwd=place,
        env={**os.environ, "HOME": str(place), "XDG_CACHE_HOME": str(place / "cache"), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=_drop_capabilities,
    )
    modules, said = set(), []
    for line in finished.stderr.splitlines():
        if line.startswith("import time:"):
            modules.add(line.rpartition("|")[2].strip())
        else:
            said.append(line)
    prefix = f"{program}: error: "
    assert all(line.startswith(prefix) for line in said), "\n".join(said)
    assert finished.stdout == ""
    assert "megatron.config.command_line" in modules and not modules & {"torch", "deepspeed"}
    assert _contents(place) == before
    return finished.returncode, [line.removeprefix(prefix) for line in said]


def _contents(place: Path) -> dict[str, tuple]:
    """All that is in a folder: names, modes, times and bytes."""
    found = {}
    for path in (place, *place.rglob("*")):
        stat = path.lstat()
        found[str(path)] = (stat.st_mode, stat.st_mtime_ns, path.read_bytes() if path.is_file() else None)
    return found


def _drop_capabilities() -> None:
    """Drop root's capabilities to read and write any file. Other users do not have them."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
