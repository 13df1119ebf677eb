"""A failed run is restarted, as long as it makes progress."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import Programs

from megatron.tools.cluster.supervise import LauncherExit, run_with_restarts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("codes", "checkpoints", "most", "result", "starts"),
    [
        ([6, 1, 0], [0, 1, 2], 5, 0, 3),
        ([6, 6, 6], [0, 1, 2, 3], 2, 6, 3),
        ([6], [0, 0], 0, 6, 1),
        ([6, 1, 137], [0, 0, 0, 0], 9, 93, 3),
        ([6, 6, 6, 6, 6, 75], [0, 0, 0, 1, 1, 1], 9, 75, 6),
        *(([code], [0], 9, code, 1) for code in (0, 2, 3, 4, 5, 7, 75)),
    ],
)
def test_restarts(codes, checkpoints, most, result, starts) -> None:
    """Codes in the order of starts; checkpoints as they are before the first and after each."""
    left, seen = iter(codes), iter(checkpoints)
    assert run_with_restarts(lambda: LauncherExit(next(left), by_signal=False), lambda: next(seen), most) == result
    assert len(list(left)) == len(codes) - starts


def test_a_run_ended_by_a_signal_is_not_restarted() -> None:
    ends: Iterator[LauncherExit] = iter([LauncherExit(1, by_signal=True)])
    assert run_with_restarts(lambda: next(ends), lambda: None, 9) == 1


AGAIN = """
import os, sys
from pathlib import Path
from megatron.tools.cluster.supervise import run_with_restarts
from megatron.tools.cluster.supervise import supervise
script, folder = sys.argv[1:]
start = lambda: supervise(["bash", "-c", script, folder], os.environ)
sys.exit(run_with_restarts(start, lambda: os.listdir(folder), 9))
"""


def test_a_crash_loop_ends(tmp_path: Path) -> None:
    """Two failures with a new checkpoint each, then three without."""
    script = "mkdir $0/1 2>/dev/null || mkdir $0/2 2>/dev/null; echo started; kill -SEGV $$"
    command = [sys.executable, "-c", AGAIN, script, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 93 and ended.stdout == "started\n" * 5, ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[0].endswith("the run failed with exit code 139: restart 1 of 9 (--max-restarts)")
    assert lines[-1].endswith("crash loop: 3 failures in a row without a new checkpoint; not restarted")


def test_a_run_that_would_not_resume_is_not_started(programs: Programs) -> None:
    words = ["--max-restarts", "1", "--num_gpus", "1", "pretrain_gpt2.py", "--save", "ck", "--load", "other"]
    ended = programs.python("tools/launch.py", *words)
    assert ended.returncode == 2 and "--max-restarts needs --save and --auto-resume" in ended.output
