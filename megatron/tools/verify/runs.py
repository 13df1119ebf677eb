"""Trains on a layout by the command line of a program, and reads the results from its metrics and checkpoints.

On a CPU the ranks are forks of one process that has imported torch and DeepSpeed, and start within a second. On a GPU
each rank is a new process, since CUDA does not survive a fork.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.parameter_state import WEIGHT, SavedStates
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.stored import in_memory
from megatron.checkpoint.tracker import newest, tag_at, tag_name
from megatron.common.environment import threads_per_rank
from megatron.common.errors import CheckpointError
from megatron.common.files import file_mode
from megatron.common.processes import die_with_parent
from megatron.config import OptimConfig, RunConfig
from megatron.launch.environment import divide_cores, free_port, prepare_environment
from megatron.model.architectures import architecture_of
from megatron.model.spec import ParameterSpec, is_trained
from megatron.tools.verify.compare import Copies, Result
from megatron.tools.verify.request import Layout, Request, checkpoint_folder, metrics_file

_SAVED_ITERATIONS = 5
"""Up to this many iterations, saving after each takes less time than a second run up to the first step."""

Preparation = tuple[Any, ...]
"""A call that each rank makes before the program: the name of a function of ``recording``, and its arguments."""


class Trainer:
    """Trains on layouts and reads their results."""

    def __init__(self, request: Request, run: RunConfig, time_limit: float) -> None:
        self._request, self._optim, self._time_limit = request, run.optim, time_limit
        prepare_environment(os.environ)  # the parent process that the ranks are forked from
        self._context = rank_context(run.parallel.device)

    def train(
        self, layout: Layout, iterations: int | None = None, prepare: Preparation = ()
    ) -> tuple[Result | None, str | None]:
        """The result of ``layout`` after ``iterations``, or the failure of its run.

        The gradients of the first step are read from the checkpoint after it. A run of few iterations saves after each;
        a longer run saves at its end, and a second run ends with the first step.
        """
        iterations = iterations or self._request.iterations
        with tempfile.TemporaryDirectory(prefix="verify_layout.", ignore_cleanup_errors=True) as root:
            run = short = Path(root) / "run"
            saves_all = iterations <= _SAVED_ITERATIONS
            try:
                if failure := self._run(layout, run, iterations, 1 if saves_all else iterations, prepare):
                    return None, failure
                step = first_step(run)
                if not saves_all and step + 1 < iterations:
                    short = Path(root) / "first"
                    if failure := self._run(layout, short, step + 1, step + 1, prepare):
                        return None, failure
                return read_result(run, short, self._optim), None
            except CheckpointError as error:
                return None, str(error)

    def _run(
        self, layout: Layout, folder: Path, iterations: int, save_interval: int, prepare: Preparation
    ) -> str | None:
        folder.mkdir()
        command = self._request.command(layout, folder, iterations, save_interval)
        ranks, log, environ = layout.processes, folder / "log.txt", self._request.environ
        return run_ranks(self._context, ranks, command, environ, log, self._time_limit, prepare)


_PRELOADED = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by the first use of ZeRO
    "torch._dynamo",  # imported by the first optimizer
    "megatron.checkpoint.load",
    "megatron.training.data_iterators",
    "megatron.training.setup",
    "megatron.tools.reporting.tracing",
    "megatron.training.trainer",
    "megatron.tools.verify.recording",
]
_FAILURE_SECONDS = 10.0
"""Time for the other ranks to exit after one has failed."""


def rank_context(device: str) -> ForkServerContext | SpawnContext:
    """The multiprocessing context of ranks on ``device``. On a CPU, it starts the fork server with shared imports."""
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
    prepare: Preparation = (),
) -> str | None:
    """Run ``python COMMAND`` as ``processes`` ranks on this host, with their output in ``log``.

    Returns None if all ranks succeed within ``time_limit`` seconds, else the failure and ``cause_in(log)``.
    """
    ranks = [
        context.Process(target=_run_program, args=(list(command), rank_environ, str(log), prepare))
        for rank_environ in _environments(processes, environ)
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
    return failure and f"{failure}:\n{cause_in(log)}"


def _environments(processes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank, with the variables that launchers set."""
    shared = {**environ, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    divide_cores(shared, processes)
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _run_program(command: list[str], environ: dict[str, str], log: str, prepare: Preparation) -> None:
    """Run the program in this process, as one rank."""
    die_with_parent()  # of a fork this is the fork server, which lives as long as the forks
    threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, file_mode())
    except OSError:  # the starter has ended, and removed the folder
        raise SystemExit(1) from None
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    if torch := sys.modules.get("torch"):  # a fork: OpenMP has read its environment already
        torch.set_num_threads(threads_per_rank(environ) or 1)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    try:
        if prepare:
            prepare_environment(os.environ)  # before torch is imported
            from megatron.tools.verify import recording

            getattr(recording, prepare[0])(*prepare[1:])
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def _end_with_starter() -> None:
    if (starter := multiprocessing.parent_process()) is not None:
        wait([starter.sentinel])
        os._exit(1)


def cause_in(log: Path, most: int = 15) -> str:
    """The first error in the log of a failed run, which may cause the later ones; without errors, the last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line for line in lines if ": error: " in line]
    return "\n".join(f"    {line}" for line in errors[:1] or lines[-most:])


def read_result(long: Path, short: Path, optim: OptimConfig) -> Result:
    """Read the result of the run in folder ``long``; gradients come from the checkpoint in ``short``, often the same.

    Raises CheckpointError if a checkpoint is incomplete or no step was made.
    """
    lines = [json.loads(line) for line in metrics_file(long).read_text(encoding="utf-8").splitlines()]
    norms = [line["grad_norm"] for line in lines]
    step = first_step(long)
    states = _parameter_states(tag_at(checkpoint_folder(short) / tag_name(step + 1)))
    clipped = min(1.0, optim.clip_grad / (norms[step] + 1e-6)) if optim.clip_grad else 1.0
    scales = {"exp_avg": 1 / clipped / (1 - optim.adam_beta1), "momentum_buffer": 1 / clipped}
    moments = {name: next(filter(copies[0].__contains__, scales), None) for name, copies in states.items()}
    return Result(
        losses=[line["lm_loss"] for line in lines],
        grad_norms=norms,
        learning_rates=[line["learning_rate"] for line in lines],
        gradients={
            name: [copy[moment] * scales[moment] for copy in states[name]] for name, moment in moments.items() if moment
        },
        first_weights=_weights(states),
        weights=_weights(_parameter_states(newest(checkpoint_folder(long)))),
        first_step=step,
    )


def first_step(folder: Path) -> int:
    """Index of the first iteration whose optimizer step the run in ``folder`` did not skip.

    Raises CheckpointError if it skipped all steps.
    """
    lines = metrics_file(folder).read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        if json.loads(line)["grad_norm"] is not None:
            return index
    raise CheckpointError(
        f"no step in {len(lines)} iterations, since all gradients overflowed: raise --iterations or "
        "lower --initial-loss-scale"
    )


def _weights(states: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> dict[str, Copies]:
    return {name: [copy[WEIGHT] for copy in copies] for name, copies in states.items()}


def _parameter_states(saved: SavedRun) -> dict[str, list[dict[str, Tensor]]]:
    """Full weights and moments of each trained parameter, in the order of the layers.

    A sharded parameter has one copy on each pipeline stage that holds it, a replicated parameter has one on each
    tensor-parallel rank of these stages. The vocabulary is without its padding.
    """
    config = saved.full_model_config()
    named = architecture_of(config).named_parameters(config)
    specs = {name: spec for name, spec in named.items() if is_trained(config, name)}
    states: dict[str, list[dict[str, Tensor]]] = {name: [] for name in specs}
    saved_states = SavedStates(saved)
    ranks = range(saved.layout.model_parallel_size)
    for stage in saved_states.files.stages():
        for name in {name for group in saved_states.files.groups(stage) for name in group}:
            parts = [in_memory(saved_states.trained(name, stage, rank)) for rank in ranks]
            states[name] += _full_copies(specs[name], parts)
    if missing := [name for name, copies in states.items() if not copies]:
        raise CheckpointError(f"{saved.path} has no state of {', '.join(missing)}")
    return states


def _full_copies(spec: ParameterSpec, parts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Tensor]]:
    """The full weight and moments of a parameter, from its state on each tensor-parallel rank in ``parts``."""
    keys = [key for key, value in parts[0].items() if isinstance(value, Tensor) and value.dim()]
    rows = spec.shape[0] if spec.is_vocabulary else None
    if spec.shard_dim is not None:
        yield {key: torch.cat([part[key] for part in parts], spec.shard_dim)[:rows] for key in keys}
        return
    for part in parts:
        yield {key: part[key][:rows] for key in keys}
