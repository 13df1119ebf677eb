"""Gloo ranks on this machine that outlive a single check."""

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil

from megatron.common.processes import exit_with_parent
from megatron.launch.environment import free_port

TIME_LIMIT = 240.0
"""Seconds for one call, the first with offload included, which may have to compile DeepSpeed's Adam."""


class RankPools:
    """One pool of workers for each world size asked for; one that failed or is worn is replaced."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def run(self, world_size: int, function: Callable, *args: Any, time_limit: float = TIME_LIMIT) -> list[Any]:
        """``function(*args)`` on every rank; the results in the order of ranks."""
        pool = self._pools.get(world_size)
        if pool is None or not pool.is_whole:
            pool = self._pools[world_size] = _Pool(world_size)
        results = pool.run(function, args, time_limit)
        if pool.is_worn:
            self._pools.pop(world_size).close()
        return results

    def run_once(self, world_size: int, function: Callable, *args: Any, time_limit: float = TIME_LIMIT) -> list[Any]:
        """The same on ranks that exit afterwards: for functions that do not clean up groups, engines or settings."""
        pool = _Pool(world_size)
        try:
            return pool.run(function, args, time_limit)
        finally:
            pool.close()

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()


def in_new_process(function: Callable, *args: Any) -> Any:
    """What ``function`` returns in a process of its own, in which torch and DeepSpeed are imported already."""
    with ProcessPoolExecutor(1, fork_server()) as pool:
        return pool.submit(function, *args).result()


MOST_THREADS = 32
"""Every group that a check makes leaves gloo threads, which wake a hundred times a second even where nothing
runs: a thousand of them take a whole core from the other tests."""


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.is_whole = True
        self._stacks = [Path(tempfile.mkstemp(suffix=f".rank{rank}.stack")[1]) for rank in range(world_size)]
        self._pipes: list[Connection] = []
        self._processes = []
        port = free_port()
        context = fork_server()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, world_size, port, str(self._stacks[rank])))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_worn(self) -> bool:
        """Whether new workers would do better."""
        try:
            return psutil.Process(self._processes[0].pid).num_threads() > MOST_THREADS
        except psutil.NoSuchProcess:
            return False

    def run(self, function: Callable, args: tuple, time_limit: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((inspect.getfile(function), function.__qualname__, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + time_limit
        while len(answers) < len(self._pipes):
            missing = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(missing, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail(f"no answer after {time_limit:.0f} s; the stacks:\n{self._dump_stacks()}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self._fail(f"rank {rank} died with exit code {self._processes[rank].exitcode}")
                if not answers[rank][0]:
                    self._fail(f"rank {rank} raised:\n{answers[rank][1]}")
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self._processes:
            process.join(10)
            process.kill()
        for path in self._stacks:
            path.unlink(missing_ok=True)

    def _fail(self, message: str) -> None:
        self.is_whole = False
        for process in self._processes:
            process.kill()
        raise AssertionError(message)

    def _dump_stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1)
        return "\n".join(f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(self._stacks))


@cache
def fork_server() -> BaseContext:
    """Forks ranks from a process that has imported torch and DeepSpeed, and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preload"])
    paths = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it is not told otherwise, and preloads nothing, silently
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if paths is not None:
            os.environ["PYTHONPATH"] = paths
    return context


def _work(pipe: Connection, rank: int, world_size: int, port: int, stack_file: str) -> None:
    exit_with_parent()  # a daemon would, too, but may have no children, and data is read by some
    faulthandler.register(signal.SIGUSR2, file=open(stack_file, "w"), all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    started = False
    while (task := pipe.recv()) is not None:
        try:
            if not started:
                _start()
                started = True
            file, name, args = task
            pipe.send((True, _function(file, name)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)  # parting from the others in order takes as long as all the groups ever made


def _start() -> None:
    from megatron.launch.environment import prepare_environment

    prepare_environment(os.environ)
    import deepspeed
    import torch

    from megatron.engines import (
        deepspeed_silenced,
        nothing_compiled_for_collectives,
        silence_known_warnings,
    )

    torch.set_num_threads(1)
    silence_known_warnings()
    nothing_compiled_for_collectives()
    with deepspeed_silenced(verbose=False):
        deepspeed.init_distributed("gloo", verbose=False)


def _function(file: str, name: str) -> Callable:
    """By file, since a test's module may have come into being after this worker."""
    module_name = Path(file).stem
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(module, name)
