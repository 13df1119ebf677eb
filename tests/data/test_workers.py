"""Worker processes do not outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARENT = """
import multiprocessing, os, time
from megatron.common.processes import exit_with_parent

def work():
    exit_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=work).start()
time.sleep(600)
"""


ORPHAN = """
import os, time
from megatron.common.processes import exit_with_parent

parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    exit_with_parent(parent)
    print("still here", flush=True)
"""


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_leaves_ctrl_c_to_its_parent_and_dies_with_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    worker = int(parent.stdout.readline())  # it is at work
    os.kill(worker, signal.SIGINT)
    time.sleep(0.2)
    assert is_running(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 120
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(worker)


def test_a_worker_whose_parent_died_before_it_began_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", ORPHAN], cwd=ROOT, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("", "")
