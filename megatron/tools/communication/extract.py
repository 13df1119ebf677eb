"""Run the ranks of a start, and collect what they communicate, and the checkpoint that the next start loads."""

import gc
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import MANIFEST, write_manifest
from megatron.checkpoint.parameter_state import (
    WEIGHT,
    SavedStates,
    State,
    is_flat,
    model_file,
    numbered_state,
    optimizer_file,
)
from megatron.checkpoint.run_file import SavedLayout
from megatron.checkpoint.tensor_files import read_file
from megatron.common.errors import LaunchError
from megatron.tools.communication.check import Trace
from megatron.tools.communication.record import Recorder, recording
from megatron.tools.one_rank import replaced
from megatron.tools.one_rank.accelerator import DEVICE
from megatron.tools.one_rank.memoryless import memoryless
from megatron.tools.one_rank.processes import each_alone
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
    import_late()
    for rank, trace, _, output in each_alone(ranks, partial(_trace, job), job.folder_of, processes):
        if trace is None or trace.exit_code not in (0, 75):
            raise LaunchError([f"rank {rank} does not run ({' '.join(job.words)}):", *output[-_SHOWN:]])
        yield trace


_SHOWN = 12
"""Lines of the output of a rank that fails."""


def import_late() -> None:
    """Import what every rank would import for itself."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # whose import would start others
    for module in _IMPORTED_LATE:
        importlib.import_module(module)


def _trace(job: Job, rank: int) -> Trace:
    """Be ``rank``, in a process of its own."""
    gc.disable()  # it ends soon
    os.environ["DS_ACCELERATOR"] = "cuda"  # whatever this machine has
    recorder = Recorder(rank, job.signal_in)
    with (
        one_rank(job.world_size, rank),
        memoryless(nothing_counts=job.nothing_counts, computed=recorder.buffers.computed),
        recording(recorder),
        replaced((SavedStates, "shard", state_without_files), (SavedStates, "copies", lambda *_, **__: ())),
    ):
        if job.prepare is not None:
            job.prepare(rank)
        words = [word.replace("{folder}", str(job.folder_of(rank))) for word in job.words]
        recorder.trace.exit_code = run_program(job.program, words)
    return recorder.trace


def gather(checkpoints: Sequence[Path], folder: Path, tensor_ranks: int) -> None:
    """The ``checkpoints`` of the ranks that were run as one in ``folder``.

    Files of weights of tensor-parallel ranks that were not run are links to those of the first: DeepSpeed counts the
    files of a layer, and ranks that stand for others read theirs.
    """
    for checkpoint in checkpoints:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    for file in sorted(folder.glob("*/*model_states.pt")):
        begin, number, end = re.split(r"(\d+)(?=.model_states.pt)", file.name)
        if int(number) % tensor_ranks == 0:
            for other in range(int(number) + 1, int(number) + tensor_ranks):
                link = file.with_name(f"{begin}{other:02}{end}")
                if not link.exists():
                    link.hardlink_to(file)
    for manifest in folder.glob(f"*/{MANIFEST}"):
        manifest.unlink()
        write_manifest(manifest.parent, {})


def state_without_files(states: SavedStates, name: str, shape: Sequence[int], *_: int) -> State:
    """In place of ``SavedStates.shard``: a checkpoint may lack the files of ranks that were not run.

    The state has what rank 0 keeps of its first parameter.
    """
    saved = states.saved
    kept = _kept(saved.path, saved.layout) if saved.has_optimizer else {}
    full = torch.zeros(tuple(shape), device=DEVICE)
    return {WEIGHT: full, **{key: full if is_flat(value) else value for key, value in kept.items()}}


@cache
def _kept(path: Path, layout: SavedLayout) -> dict[str, Any]:
    if layout.has_optimizer_partitions:
        state = read_file(optimizer_file(path, layout, 0, 0), mapped=True)["optimizer_state_dict"]
    else:
        state = read_file(model_file(path, layout, 0), mapped=True)["optimizer"]
    return numbered_state(state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state, 0)
