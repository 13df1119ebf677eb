"""No process outlives its launcher, the exit code is truthful, and a failed run that makes progress is restarted."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.bare_ranks import await_processes
from support.programs import Programs

from megatron.tools.cluster.supervise import FORWARDED, LauncherExit, run_with_restarts

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = """
import os, sys
from megatron.tools.cluster.supervise import supervise
sys.exit(supervise(sys.argv[1:], os.environ).code)
"""
BEGUN = 'touch "$RANK_EXIT_CODES/rank 0"; touch "$RANK_EXIT_CODES/rank 1"; '
ENDED = 'echo -n 143 > "$RANK_EXIT_CODES/rank 0"; exit 143'
LOST = "a connection of ssh, or what it started, has failed; tools/doctor.py looks for the cause"
EXITED = "-c: error: the launcher exited with 0, but"


def supervised(script: str, *words: str) -> subprocess.Popen[str]:
    """A shell script in place of a launcher."""
    command = [sys.executable, "-c", SUPERVISE, "bash", "-c", script, *words]
    environ = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}  # below torchrun
    return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("script", "code", "stderr"),
    [
        ("exit 0", 0, ""),
        ("exit 75", 75, ""),
        ('test -z "$TORCHELASTIC_USE_AGENT_STORE$LOCAL_WORLD_SIZE"', 0, ""),
        ("kill -KILL $$", 137, ""),
        (
            'touch "$RANK_EXIT_CODES/rank 0" $RANK_EXIT_CODES/trained; exit 245',
            6,
            "-c: error: rank 0 was killed by SIGSEGV\n",
        ),
        (
            'touch "$RANK_EXIT_CODES/rank 0"; exit 247',
            6,
            "-c: error: rank 0, or another that had just begun, was killed by SIGKILL\n",
        ),
        ("exit 255", 6, f"-c: error: {LOST}\n"),
        ("exit 241", 6, "-c: error: a rank that started was killed by SIGTERM\n"),
        ('touch "$RANK_EXIT_CODES/rank 1"; echo -n 6 > "$RANK_EXIT_CODES/rank 0"; exit 247', 6, ""),
        ('touch "$RANK_EXIT_CODES/rank 1"; echo -n 3 > "$RANK_EXIT_CODES/rank 0"; exit 3', 3, ""),
        ('touch "$RANK_EXIT_CODES/rank 0"; echo -n 0 > "$RANK_EXIT_CODES/rank 0"', 0, ""),
        ('touch "$RANK_EXIT_CODES/rank 1"', 6, f"{EXITED} rank 1 of this host was killed\n"),
        (
            'for rank in "0 6" "1 5" "2 6"; do echo -n ${rank#* } > "$RANK_EXIT_CODES/rank ${rank% *}"; done',
            5,
            f"{EXITED} rank 1 of this host exited with 5\n",
        ),
    ],
)
def test_exit_codes(script: str, code: int, stderr: str) -> None:
    process = supervised(script)
    assert (process.communicate()[1], process.returncode) == (stderr, code)


def test_no_process_is_left(tmp_path: Path) -> None:
    """Not even a stopped one that ignores signals, in a session of its own, whose launcher was killed."""
    stubborn = "trap '' TERM HUP; kill -STOP $$; sleep 1000"
    process = supervised('setsid bash -c "$0" "$1" & while true; do sleep 1; done', stubborn, str(tmp_path))
    launcher = next(p for p in await_processes(str(tmp_path), 3) if p.ppid() == process.pid)
    launcher.kill()
    assert process.wait() == 137
    await_processes(str(tmp_path), 0)


def test_a_watch_knows_that_a_signal_was_forwarded() -> None:
    """This one sends it, and then asks to kill the launcher, which ignores it."""
    watch = "lambda launcher, was_signalled: was_signalled or os.kill(os.getpid(), 15) is not None"
    program = SUPERVISE.replace("os.environ)", f"os.environ, {watch})").replace(".code", "[:3] != (137, True, True)")
    inherited = "import signal; signal.signal(15, signal.SIG_IGN)"
    command = [sys.executable, "-c", f"{inherited}\n{program}", "sleep", "1000"]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [("exit 75", 75), ("exit 0", 0), ("exit 1", 138), (f"{BEGUN}exit 247", 138), ("exit 6", 6), (ENDED, 138)],
)
def test_a_signal_is_forwarded_from_the_first_moment_on(end: str, code: int) -> None:
    process = supervised(f"trap '{end}' USR1; kill -USR1 $PPID; while true; do sleep 0.1; done")
    assert process.wait() == code


def test_the_launcher_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    process = supervised("while true; do sleep 0.1; done", str(tmp_path))
    await_processes(str(tmp_path), 2)
    process.kill()
    process.wait()
    await_processes(str(tmp_path), 0)


def test_helpers_are_not_ended_with_a_launcher() -> None:
    """Those that look at hosts, beside an elastic run; what the launcher has started is no helper."""
    program = """
import os, subprocess, sys
from megatron.tools.cluster.supervise import HELPER, supervise
os.environ[HELPER] = "1"
helper = subprocess.Popen(["sleep", "60"])
supervise(["bash", "-c", "sleep 61 & echo $! >&2"], os.environ)
print(helper.poll())
helper.kill()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "None\n" and not Path("/proc", done.stderr.strip()).exists()


@pytest.mark.parametrize(("parent", "code"), [("os.getppid()", 0), ("os.getppid() + 1", 6)])
def test_a_process_whose_parent_has_ended_before_it_asked_to_end_with_it(parent: str, code: int) -> None:
    program = f"import os; from megatron.common.processes import die_with_parent; die_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == code


def test_the_launchers_of_hosts_get_the_log_level(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from _deepspeed_runner import with_log_level

    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "level", logging.WARNING)
    start = ["pdsh", "-w", "a", "cd x;", sys.executable, "-u", "-m", "deepspeed.launcher.launch", "a"]
    assert with_log_level(start) == [*start[:8], "--log_level=warning", "a"]
    for other in (["pdsh", "-w", "a", "pkill -f ", "-u\\ -m\\ deepspeed.launcher.launc"], ["ssh", "a"], "ls"):
        assert with_log_level(other) == other


def test_what_pdsh_says_about_a_lost_host_is_shown(monkeypatch, capfd) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from _deepspeed_runner import _show

    lines = [b"a: x\n", *(b"pdsh@h: a: ssh exited with exit code %d\n" % code for code in (1, 6, 75, 127, 143))]
    news = [b"pdsh@h: a: ssh exited with exit code %d\n" % code for code in (247, 255)]
    _show(iter([*lines, *news, b"b: y" + lines[1]]))
    assert capfd.readouterr().err.encode() == b"".join([lines[0], *news, b"b: y\n"])


def test_processes_that_ranks_have_left_are_reaped(tmp_path: Path) -> None:
    """DeepSpeed's launcher awaits them after a signal, for half a minute."""
    process = supervised(
        "(sleep 0.2 & echo $! > $0); while [ -e /proc/$(cat $0) ]; do sleep 0.1; done", str(tmp_path / "pid")
    )
    assert process.wait(timeout=60) == 0


def test_any_signal_to_the_runner_ends_the_launchers(monkeypatch) -> None:
    """DeepSpeed's runner has a handler for two of them, and only for the launchers of several hosts."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import _deepspeed_runner as runner

    handlers = dict.fromkeys(FORWARDED, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    handlers[signal.SIGHUP] = signal.SIG_IGN
    done: list[object] = []
    monkeypatch.setattr(runner.signal, "getsignal", handlers.__getitem__)
    monkeypatch.setattr(runner.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(runner.os, "kill", lambda *words: done.append(words))
    runner.handle_signals()
    assert handlers.pop(signal.SIGHUP) == signal.SIG_IGN, "by nohup"
    assert list(handlers.values()) == [runner.end_launchers] * 3
    ssh, launcher = (
        SimpleNamespace(args=["x", "-u", name], poll=lambda: None) for name in ("ssh", str(runner.LAUNCHER))
    )
    launcher.terminate, launcher.pid = lambda: done.append("ended"), 5
    rank = SimpleNamespace(kill=lambda: done.append("killed"))
    monkeypatch.setattr(runner.psutil, "Process", lambda pid: SimpleNamespace(children=lambda: [rank]))
    monkeypatch.setattr(runner._Remembered, "all", [ssh, launcher])
    monkeypatch.setattr(runner._Remembered, "ended", [])
    for number in handlers:
        handlers[number](number, None)
    assert done == ["ended", "killed", "killed"]
    runner._Remembered.all.pop()
    handlers[signal.SIGUSR1](signal.SIGUSR1, None)
    assert handlers[signal.SIGUSR1] == signal.SIG_DFL and done.pop() == (os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([75, 75], 75),
        ([75, -15], 75),  # the second one had just begun
        ([143, -15], 143),
        ([0, 0], 0),
        ([75, 6, 7], 6),
        ([75, -9], 6),
    ],
)
def test_the_code_of_the_ranks_of_a_host_after_a_signal(monkeypatch, codes: list[int], code: int) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from _deepspeed_launcher import code_after_signal

    assert code_after_signal(codes) == code


@pytest.mark.parametrize(("words", "visible"), [(["--include=localhost:99"], ""), ([], "99"), ([], "GPU-8a1b")])
def test_devices_that_this_host_lacks_are_one_line(programs: Programs, words: list[str], visible: str) -> None:
    command = ("tools/_deepspeed_runner.py", "--log_level=critical", *words, "x.py")
    done = programs.warm(1, *command, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 2 and done.output.splitlines()[-1].startswith("launch.py: error: "), done.output
    assert "Traceback" not in done.output


RANK = """
import os, signal, sys, time
from pathlib import Path
from megatron.common.processes import exit_with_launcher
exit_with_launcher(os.environ)
code = Path(os.environ["RANK_EXIT_CODES"], "rank 0")
def save(*_):
    time.sleep(0.5)
    code.write_text("75")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
code.touch()
Path(sys.argv[-1]).touch()
time.sleep(100)
"""


def test_the_ranks_of_a_single_host_save_after_a_signal_to_their_launcher(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "hostfile").write_text("localhost slots=1\n")
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["tools/launch.py", "--hostfile", tmp_path / "hostfile", tmp_path / "rank.py", tmp_path / "ready"]
    process = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)  # SIGINT would be ignored if the tests run in a shell's background
    assert process.wait() == 75


STOPPED_RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
print(time.time())
sys.exit(6)
"""


def test_a_stopped_rank_is_killed_when_another_has_failed(tmp_path: Path, programs: Programs) -> None:
    """Without the half minute that DeepSpeed's launcher waits for its end."""
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    (tmp_path / "rank.py").write_text(STOPPED_RANK)
    words = ("tools/launch.py", "--hostfile", tmp_path / "hostfile", tmp_path / "rank.py")
    ended = programs.python(*words)
    assert ended.returncode == 6, ended.output
    assert time.time() - float(ended.output.splitlines()[-1]) < 5


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
    assert run_with_restarts(lambda: LauncherExit(next(left), signals=0), lambda: next(seen), most) == result
    assert len(list(left)) == len(codes) - starts


def test_a_run_ended_by_a_signal_is_not_restarted() -> None:
    ends: Iterator[LauncherExit] = iter([LauncherExit(1, signals=1)])
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
