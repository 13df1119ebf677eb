"""What the host does not allow is a line with code 7, before libraries wait for it or fail in their own ways."""

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.evaluating import load_tool

from megatron.checkpoint.files import disk_errors
from megatron.common.errors import ResourceError, failure_of_host, limit_advice
from megatron.launch import host_limits
from megatron.launch.host_limits import check_host

RANK = "import sys; sys.argv=['train']; from megatron.launch.rank import run_rank; run_rank(lambda: 0)"

ROOT = Path(__file__).resolve().parents[2]


def limited(kind: int, value: int) -> subprocess.CompletedProcess[str]:
    """The end of a rank that does nothing, under a limit."""
    return subprocess.run(
        [sys.executable, "-B", "-c", RANK],  # or truncated bytecode would stay
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("kind", "value", "advice"),
    [
        (resource.RLIMIT_NOFILE, 16, "-n"),
        (resource.RLIMIT_AS, 3 << 28, "-v"),
        (resource.RLIMIT_DATA, 1 << 27, "-d"),
        (resource.RLIMIT_FSIZE, 0, "-f"),
    ],
)
def test_a_low_limit_is_one_line(kind: int, value: int, advice: str) -> None:
    ended = limited(kind, value)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 7 and line.startswith("train: error: ") and line.endswith(f"raise ulimit {advice}")


@pytest.mark.parametrize("limit", ["-d", "-v"])
def test_a_tool_with_too_little_memory_is_one_line(limit: str) -> None:
    """The libraries that it imports would hang or abort."""
    tool = ["bash", "-c", f"ulimit {limit} 32768; {sys.executable} -B tools/preprocess_data.py --help"]
    ended = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 7 and line.startswith("preprocess_data.py: error: ") and line.endswith(limit)


def test_the_launcher_checks_before_it_starts_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    tool = f"ulimit -v 600000; {sys.executable} -B tools/launch.py --num_gpus 1 {tmp_path}/train.py"
    ended = subprocess.run(["bash", "-c", tool], cwd=ROOT, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 7 and line.startswith("launch.py: error: ") and line.endswith("raise ulimit -v")


def test_an_error_that_cannot_be_written_has_its_exit_code() -> None:
    with open("/dev/full", "w") as full:
        tool = [sys.executable, "tools/plan.py", "--devices", "x"]
        assert subprocess.run(tool, cwd=ROOT, stderr=full, check=False).returncode == 2


@pytest.mark.parametrize("program", ["tools/plan.py", "tools/launch.py", "pretrain_gpt2.py"])
def test_a_working_folder_that_is_gone_is_one_line(program: str, tmp_path: Path) -> None:
    script = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} {ROOT / program}"
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 7 and "the working folder is gone" in line


def after(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


def raised(error: Exception):
    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (threading.Thread, "start", raised(RuntimeError("can't start new thread")), "threads"),
        (socket.socket, "connect", raised(OSError(errno.ENETUNREACH, "Network is unreachable")), "127.0.0.1"),
        (os, "access", lambda *_: False, "/dev/shm"),
        (host_limits, "Path", lambda _: Path("/nowhere"), "/proc"),
    ],
)
def test_what_is_missing_is_named(
    owner: object, name: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_host({})
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ResourceError, match=said) as caught:
        check_host({})
    assert len(caught.value.messages) == 1


@pytest.mark.parametrize(("place", "ranks"), [({}, 1), ({"LOCAL_RANK": "0", "LOCAL_SIZE": "3"}, 3)])
def test_the_first_rank_of_a_host_tries_the_threads_of_all(
    place: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone would find enough, and a library of one of them abort later."""
    allowed = iter(range(24 * ranks - 1))

    def start(_: threading.Thread) -> None:
        if next(allowed, None) is None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    check_host({"LOCAL_RANK": "1", "LOCAL_SIZE": "3"})
    with pytest.raises(ResourceError, match=f"does not allow {24 * ranks} threads more"):
        check_host(place)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device"), "space"),
        (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
        (MemoryError(), "memory"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "TMPDIR"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (RuntimeError("[enforce fail at device.cc:186] rv != -1. Too many open files"), "ulimit -n"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed. "), "memory"),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Bus error. "), "/dev/shm"),
        (RuntimeError("DataLoader worker (pid 9) is killed by signal: Aborted. "), None),
        (RuntimeError("Resource temporarily unavailable"), "ulimit -u"),  # a thread of gloo
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),  # a process
        (after(ImportError("numpy"), ImportError("libopenblas.so: failed to map segment")), "memory"),
        (after(KeyError("x"), KeyError("y")), None),
        (RuntimeError("shape mismatch"), None),
        (KeyError("Too many open files"), None),
    ],
)
def test_limits_are_told_from_bugs(error: Exception, advice: str | None) -> None:
    assert (limit_advice(error) is None) == (failure_of_host(error) is None) == (advice is None)
    assert advice is None or advice in str(failure_of_host(error))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EFBIG, errno.ENOMEM, errno.EAGAIN])
def test_what_to_do_about_a_file_that_cannot_be_written_fits_the_limit(tmp_path: Path, number: int) -> None:
    error = OSError(number, os.strerror(number))
    for written in (
        disk_errors(tmp_path, "the checkpoint", 0),
        load_tool("_atomic_file").atomic_file(tmp_path / "x", "-o"),
    ):
        with pytest.raises(ResourceError) as caught, written:
            raise error
        assert str(limit_advice(error)) in str(caught.value)


def test_the_line_is_the_last_one_although_half_made_objects_fail(tmp_path: Path) -> None:
    """As torch's iterator over workers does that could not start them."""
    (tmp_path / "program.py").write_text(
        "import errno\n"
        "from megatron.launch.rank import run_rank\n"
        "class Half:\n"
        "    def __init__(self):\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    def __del__(self):\n"
        "        self.never_set\n"
        "run_rank(lambda: Half())\n"
    )
    command = [sys.executable, tmp_path / "program.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 7 and "No space left on device" in line
