"""Run ranks one by one, each alone in a process, and collect what they communicate."""

import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron.common.errors import LaunchError
from megatron.common.processes import die_with_parent
from megatron.tools.communication.record import Recorder, recording
from megatron.tools.communication.trace import Trace
from megatron.tools.one_rank.memoryless import memoryless
from megatron.tools.one_rank.run import one_rank, run_program

Prepare = Callable[[int], None]
"""Called with the number of a rank in its process, before its program."""


_IMPORTED_LATE = (
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory", "encodings.idna", "megatron.checkpoint.huggingface", "megatron.checkpoint.resharding",
    "megatron.checkpoint.snapshot_recovery", "megatron.cli.settings_file", "megatron.data.fingerprint",
    "megatron.tools.reporting.tracing", "megatron.training.measurements", "megatron.training.preflight",
    "megatron.training.setup", "pydantic.dataclasses", "pydantic.type_adapter", "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run of a program by ranks that are alone."""

    program: Path
    words: Sequence[str]
    """Of the command line; ``{folder}`` in them is the rank's own folder."""
    world_size: int
    folder: Path
    """For the files of all ranks, each in a folder of its own."""
    prepare: Prepare | None = None
    nothing_counts: bool = False
    """See ``memoryless``."""
    signal_in: int | None = None
    """The iteration in which the rank receives SIGTERM."""

    def folder_of(self, rank: int) -> Path:
        """Where ``rank`` works."""
        return self.folder / f"rank{rank}"


def extract(job: Job, ranks: Sequence[int], processes: int) -> Iterator[Trace]:
    """The traces of ``ranks``, each as soon as it is there. Raises LaunchError if the program of one fails."""
    context = multiprocessing.get_context("fork")
    import_late()
    left = list(ranks)
    running: dict[Any, Any] = {}
    try:
        while left or running:
            while left and len(running) < processes:
                rank = left.pop(0)
                job.folder_of(rank).mkdir(parents=True, exist_ok=True)
                process = context.Process(target=_run, args=(job, rank))
                process.start()
                running[process.sentinel] = rank, process
            for sentinel in wait(list(running)):
                rank, process = running.pop(sentinel)
                process.join()
                yield _result(job, rank)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def import_late() -> None:
    """Import what every rank would import for itself."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # whose import would start others
    for module in _IMPORTED_LATE:
        importlib.import_module(module)


def _run(job: Job, rank: int) -> None:
    """Be ``rank``, in a process of its own."""
    die_with_parent()
    gc.disable()  # a process that ends soon
    folder = job.folder_of(rank)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["DS_ACCELERATOR"] = "cuda"  # whatever this machine has
    try:
        words = [word.replace("{folder}", str(folder)) for word in job.words]
        recorder = Recorder(rank, job.signal_in)
        with (
            one_rank(job.world_size, rank),
            memoryless(nothing_counts=job.nothing_counts, computed=recorder.buffers.computed),
            recording(recorder),
        ):
            if job.prepare is not None:
                job.prepare(rank)
            recorder.trace.exit_code = run_program(job.program, words)
        (folder / "trace").write_bytes(pickle.dumps(recorder.trace))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


_SHOWN = 12
"""Lines of the output of a rank that fails."""


def _result(job: Job, rank: int) -> Trace:
    folder = job.folder_of(rank)
    file = folder / "trace"
    trace: Trace | None = pickle.loads(file.read_bytes()) if file.exists() else None  # noqa: S301, this tool's own
    if trace is None or trace.exit_code not in (0, 75):
        lines = (folder / "log.txt").read_text().strip().splitlines()
        raise LaunchError([f"rank {rank} does not run ({' '.join(job.words)}):", *lines[-_SHOWN:]])
    file.unlink()
    return trace
