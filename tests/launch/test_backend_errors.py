"""What is made of the errors of gloo and NCCL, in the words in which users have reported them."""

import gc
import linecache
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from support.hosts import ROOT
from torch.distributed import DistBackendError, DistNetworkError

from megatron.common.processes import failure_in_child
from megatron.engines.transfers import Transfers
from megatron.launch import progress as progress_module
from megatron.launch.progress import Position, ProgressState, current_frames
from megatron.launch.rank import failure_of_nccl, is_connection_lost, is_timeout, run_rank
from megatron.parallel import sequence
from megatron.parallel.pipeline.program import Transfer
from megatron.parallel.tensor import mappings

REMOTE = DistBackendError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.17.0.2<33759> failed : "
    "Connection reset by peer"
)
INTERNAL = DistBackendError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, internal error - please report "
    "this issue to the NCCL developers, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\n"
    "Net : Connection closed by remote peer a100-st-p4d24xlarge-22<47861>"
)
SYSTEM = DistBackendError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external "
    "library call failed or device error. \nLast error:\nError while creating shared memory segment "
    "/dev/shm/nccl-8NGZjX (size 9637888), error: No space left on device (28)"
)
TIMEOUT = DistBackendError(
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: [Rank 3] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, NumelOut=112, "
    "Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out."
)
ABORTED = DistBackendError(f"NCCL communicator was aborted on rank 3. Original reason for failure was: {TIMEOUT}")
STORE = DistBackendError(
    "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
    "store->get('0'), but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
)
CLOSED = DistNetworkError(
    "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
)
GLOO_LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")
GLOO_LATE = RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation")
OWN = RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "lost", "late", "of_nccl"),
    [
        (REMOTE, True, False, "Connection reset by peer"),
        (INTERNAL, True, False, "Connection closed by remote peer"),
        (SYSTEM, False, False, "Error while creating shared memory segment"),
        (TIMEOUT, False, True, None),
        (ABORTED, False, True, None),
        (STORE, False, True, None),
        (CLOSED, True, False, None),
        (GLOO_LOST, True, False, None),
        (GLOO_LATE, False, True, None),
        *((error, False, False, None) for error in OWN),
    ],
)
def test_an_error_of_the_backend_is_understood(error, lost: bool, late: bool, of_nccl: str | None) -> None:
    assert (is_connection_lost(error), is_timeout(error)) == (lost, late)
    reason = failure_of_nccl(error)
    assert reason is None if of_nccl is None else of_nccl in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (REMOTE, 6, "rank 0: another rank failed first"),
        (SYSTEM, 6, "No space left on device (28); NCCL_DEBUG=INFO shows what it did before"),
        (STORE, 6, "rank 0: a collective did not end within --distributed-timeout-minutes"),
        (
            RuntimeError("DataLoader worker (pid 9) is killed by signal: Segmentation fault. "),
            6,
            "(Segmentation fault)",
        ),
        (OWN[0], 1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_the_exit_code_of_an_error_at_the_start(monkeypatch, capsys, error, code: int, last: str) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("megatron.launch.rank.exit_with_launcher", lambda _: None)
    monkeypatch.setattr("megatron.launch.rank._show_crashes", lambda _: None)

    def main() -> int:
        raise error

    run_rank(main)
    assert ended == [code]
    assert capsys.readouterr().err.splitlines()[-1].endswith(last)


def test_a_silent_rank_that_is_ended_has_the_code_of_the_error() -> None:
    """srun ends the other tasks with the first that fails, and returns the largest code: 143 of a signal, if any."""
    program = """
import os, signal, threading
from megatron.common.errors import ConfigError
from megatron.launch.rank import run_rank
def main():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    raise ConfigError("a mistake")
run_rank(main)
"""
    environ = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "")


WATCHDOG = """
#include <stdexcept>
#include <thread>
namespace c10 { struct DistBackendError : std::runtime_error { using std::runtime_error::runtime_error; }; }
extern "C" void watchdog() { std::thread([] { throw c10::DistBackendError("Watchdog caught"); }).join(); }
extern "C" void another() { std::thread([] { throw std::runtime_error("another"); }).join(); }
"""
PROGRAM = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from megatron.launch.rank_failure import exit_when_watchdog_fails
exit_when_watchdog_fails(lambda: print("the watchdog", flush=True))
getattr(ctypes.CDLL(sys.argv[2]), sys.argv[3])()
"""


def test_the_abort_of_nccls_watchdog_is_exit_code_6(tmp_path: Path) -> None:
    """And any other exception of C++ still ends the process by SIGABRT."""
    (tmp_path / "watchdog.cpp").write_text(WATCHDOG)
    library = tmp_path / "watchdog.so"
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "watchdog.cpp", "-o", library, "-pthread"], check=True)
    ended = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, ROOT, library, name], capture_output=True, text=True, check=False
        )
        for name in ("watchdog", "another")
    ]
    assert [(process.returncode, process.stdout) for process in ended] == [(6, "the watchdog\n"), (-6, "")]
    assert "another" in ended[1].stderr


@pytest.mark.parametrize(("device", "waits"), [("cuda", True), ("cpu", False)])
def test_a_rank_that_waits_for_its_device_does_not_count_as_hung(monkeypatch, device: str, waits: bool) -> None:
    """Where a GPU's queue holds a collective that waits for others, the host stops in a synchronization."""
    accelerator = CUDA_Accelerator()
    monkeypatch.setattr(accelerator, "device_name", lambda *_: device)
    monkeypatch.setattr(progress_module, "get_accelerator", lambda: accelerator)

    def read_loss(acquire: Callable) -> None:
        loss = SimpleNamespace(item=acquire)
        loss.item()

    position = position_of_main_thread(monkeypatch, read_loss)
    assert position.in_collective is waits
    assert ("waiting for the device at " in position.text) is waits and "(read_loss)" in position.text


@pytest.mark.parametrize(
    "file", ["parallel/sequence/__init__.py", "parallel/tensor/mappings.py", "engines/transfers.py"]
)
def test_a_rank_that_waits_for_what_it_has_started_does_not_count_as_hung(monkeypatch, file: str) -> None:
    """Keys of a ring, a sum while products are computed, the input of a stage: the wait itself has no frame."""
    tensor, transfers = torch.zeros(1), Transfers(MagicMock(), torch.device("cpu"))

    def wait(acquire: Callable) -> None:
        work = SimpleNamespace(wait=acquire)
        if file == "parallel/sequence/__init__.py":
            monkeypatch.setattr(sequence, "dist", MagicMock(batch_isend_irecv=lambda operations: [work]))
            sequence._pass_on(tensor, MagicMock(**{"size.return_value": 2}), 1)()
        elif file == "parallel/tensor/mappings.py":
            mappings._when_done(tensor, work)
        else:
            one = Transfer(False, True, 0, 0, 1)
            transfers._arriving[one] = [work], tensor
            transfers.take(one)

    position = position_of_main_thread(monkeypatch, wait)
    assert position.in_collective and f"megatron/{file}:" in position.text and "in wait, at /" in position.text


def test_frames_are_read_while_there_is_garbage() -> None:
    def read_frames() -> None:
        gc.disable()
        gc.set_threshold(1)
        for _ in range(20):
            garbage: list = [threading.local()]
            garbage[0].itself = garbage
            garbage.append(garbage)
            del garbage
            gc.enable()
            current_frames()
            gc.disable()

    assert failure_in_child(read_frames, seconds=10, most_bytes=1 << 30) is None


def position_of_main_thread(monkeypatch, waits: Callable[[Callable], None]) -> Position:
    """The position of a rank whose main thread runs ``waits(acquire)``, where ``acquire`` is a call without a frame."""
    lock = threading.Lock()
    thread = threading.Thread(target=waits, args=[lock.acquire], daemon=True)
    lock.acquire()
    try:
        thread.start()
        deadline = time.monotonic() + 60
        while not is_at_call(thread):
            assert thread.is_alive() and time.monotonic() < deadline, "the thread does not wait"
            time.sleep(0.01)
        monkeypatch.setattr("threading.main_thread", lambda: thread)
        return ProgressState().position({})
    finally:
        lock.release()
        thread.join(60)


def is_at_call(thread: threading.Thread) -> bool:
    """Whether ``thread`` is in a line that calls ``item()`` or ``wait()``."""
    frame = current_frames().get(thread.ident or 0)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
    return any(call in line for call in (".item()", ".wait()"))
