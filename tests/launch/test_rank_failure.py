"""A rank that dies: the others exit, and the cause is the last line printed. tests/test_torture.py resumes."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.bare_ranks import BareRanks, await_processes
from support.programs import TINY_MODEL

from megatron.common.errors import LaunchError
from megatron.common.processes import EXIT_SIGNALS, ExitSignal
from megatron.launch import rank_failure
from megatron.launch.environment import free_port

SETTINGS = "--train-iters 5 --batch-size 2 --gas 4 --eval-iters 0".split()


def test_a_killed_rank_is_named_under_torchrun(programs) -> None:
    program = ("tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments)
    ended = programs.torchrun(2, *program, *SETTINGS, "--pipe-parallel-size", "2", FAULT="signal 1 3 SIGKILL")
    printed, _, report = ended.output.partition("Root Cause (first observed failure):")
    # The kernel reports the signal only until torchrun has reaped the process, which may happen first.
    found = "^pretrain_gpt2.py: error: rank 1 was killed( by SIGKILL)? in iteration 3$"
    assert re.search(found, printed, re.MULTILINE)
    assert printed.count(": error: ") == 1, "no other rank prints an error"
    assert "rank      : 1 " in report and "(SIGKILL)" in report


@pytest.mark.parametrize(
    ("fault", "rank", "code", "last"),
    [
        ("signal 0 2 SIGSEGV", 0, -signal.SIGSEGV, "rank 0 was killed by SIGSEGV in iteration 2"),
        ("raise 1 2", 1, 1, "ValueError: an error of this rank alone"),
    ],
)
def test_all_exit_and_the_cause_comes_last(
    programs, tmp_path: Path, fault: str, rank: int, code: int, last: str
) -> None:
    """Rank 0 hosts the store, which ends with it."""
    ranks = BareRanks(programs, tmp_path / "log", fault, *SETTINGS, size=2, corpses=True)
    expected = [6, 6]
    expected[rank] = code
    assert ranks.ended() == expected, ranks.output
    assert ranks.output.splitlines()[-1].endswith(last), ranks.output


def test_the_only_rank_crashes_and_a_line_comes_last(programs, tmp_path: Path) -> None:
    """After the stack; no process is left."""
    words = ("tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments, *SETTINGS)
    ended = programs.python(*words, "--metrics-file", tmp_path / "metrics", FAULT="signal 0 2 SIGABRT")
    assert ended.returncode == -signal.SIGABRT and "faulty_pretrain.py" in ended.output, ended.output
    assert re.search(r"\npretrain_gpt2.py: error: .*SIGABRT[^\n]*\n$", ended.output), ended.output
    await_processes(str(tmp_path), 0)


def test_a_rank_whose_launcher_ended_it_before_it_noticed_does_not_wait_for_that(monkeypatch) -> None:
    """torchrun sees the end of a rank within a tenth of a second, one that waits in shared memory within two."""
    before = {number: signal.getsignal(number) for number in EXIT_SIGNALS}
    monitor = SimpleNamespace(_known=threading.Event(), _progress=SimpleNamespace(iteration=1))
    monitor._known.set()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(rank_failure.time, "sleep", sleep)
    try:
        for is_early in (False, True):
            ExitSignal().defer()
            if is_early:
                os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(LaunchError):
                rank_failure._RankFailureMonitor.exit_after_failure(monitor)
            assert len(slept) == 1, "it waits for the signal, but only if there was none"
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


STUCK = """
import os, sys, time
from pathlib import Path
from megatron.launch.rank import run_rank
run_rank(lambda: Path(sys.argv[-1], os.environ["RANK"]).touch() or time.sleep(1000))
"""


def test_ranks_exit_with_torchrun(programs, tmp_path: Path) -> None:
    """As they do with tools/launch.py: tests/tools/cluster/test_launching.py."""
    (tmp_path / "rank.py").write_text(STUCK)
    command = ["torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), tmp_path / "rank.py", tmp_path]
    with programs.started(tmp_path / "log", *command, PYTHONPATH=os.getcwd()) as started:
        while not all((tmp_path / rank).exists() for rank in "01"):
            with pytest.raises(subprocess.TimeoutExpired):
                started.wait(0.1)
        started.kill()
        await_processes(str(tmp_path), 0)
