"""Start the ranks of a run within a second: forks of one process that has imported torch and DeepSpeed. No torch here.

Where there is a GPU each rank is a new process, since CUDA does not survive a fork.
"""

import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from megatron.common.environment import threads_per_rank
from megatron.common.files import file_mode
from megatron.common.processes import die_with_parent
from megatron.launch.environment import divide_cores, free_port

_PRELOADED = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by the first use of ZeRO
    "torch._dynamo",  # imported by the first optimizer
    "megatron.checkpoint.load",
    "megatron.training.data_iterators",
    "megatron.training.setup",
    "megatron.tools.reporting.tracing",
    "megatron.training.trainer",
]
_FAILURE_SECONDS = 10.0
"""Time for the other ranks to exit after one has failed."""


def rank_context(device: str) -> ForkServerContext | SpawnContext:
    """How the ranks of runs on ``device`` are started. On a CPU it begins with the imports that they share."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    python_path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server searches no other path for what it preloads
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if python_path is not None:
            os.environ["PYTHONPATH"] = python_path
    return context


def run_ranks(
    context: ForkServerContext | SpawnContext,
    processes: int,
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    time_limit: float,
) -> str | None:
    """Run ``python COMMAND`` as so many ranks on this host, with their output in ``log``.

    Returns None if all ranks succeed within ``time_limit`` seconds, else what went wrong and the last lines of the log.
    """
    ranks = [
        context.Process(target=_run_program, args=(list(command), place, str(log)))
        for place in _environments(processes, environ)
    ]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + time_limit
        running, failure = list(ranks), None
        while running and (ended := wait([rank.sentinel for rank in running], max(deadline - time.monotonic(), 0))):
            for rank in [rank for rank in running if rank.sentinel in ended]:
                rank.join()
                running.remove(rank)
                if rank.exitcode and failure is None:
                    failure = f"exit code {rank.exitcode}"
                    deadline = min(deadline, time.monotonic() + _FAILURE_SECONDS)
        if running and failure is None:
            failure = f"not finished after {time_limit:g} s"
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
    return failure and f"{failure}:\n{_last_lines(log)}"


def _environments(processes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank, as launchers set it."""
    shared = {**environ, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    divide_cores(shared, processes)
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run_program(command: list[str], environ: dict[str, str], log: str) -> None:
    """Become the program, on one rank."""
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, file_mode())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    if torch := sys.modules.get("torch"):  # a fork: OpenMP has read its environment already
        torch.set_num_threads(threads_per_rank(environ) or 1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def _last_lines(log: Path, lines: int = 15) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
