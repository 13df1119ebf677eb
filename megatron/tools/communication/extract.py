"""Runs ranks of a run one by one, records their communication, and merges their checkpoints for the next start."""

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

from megatron.checkpoint import across_ranks
from megatron.checkpoint.manifest import MANIFEST, write_manifest
from megatron.checkpoint.parameter_state import SavedStates, State
from megatron.checkpoint.saved_files import numbered_state
from megatron.checkpoint.saved_layout import SavedLayout, model_file, optimizer_file
from megatron.checkpoint.stored import WEIGHT, is_flat
from megatron.checkpoint.tensor_files import read_file
from megatron.common.errors import LaunchError
from megatron.engines.optimizers import block_matrices
from megatron.model.architectures import architecture_of
from megatron.tools.communication.check import Trace
from megatron.tools.communication.record import Recorder, recording
from megatron.tools.one_rank import patched
from megatron.tools.one_rank.accelerator import DEVICE
from megatron.tools.one_rank.memoryless import memoryless
from megatron.tools.one_rank.processes import run_in_forks
from megatron.tools.one_rank.run import one_rank, run_program

Prepare = Callable[[int], None]
"""Called with the rank in its process, before its program runs."""


_LAZY_IMPORTS = (
    "deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory", "encodings.idna", "megatron.checkpoint.huggingface", "megatron.checkpoint.resharding",
    "megatron.checkpoint.snapshot_recovery", "megatron.cli.settings_file", "megatron.data.fingerprint",
    "megatron.tools.reporting.tracing", "megatron.training.measurements", "megatron.training.preflight",
    "megatron.training.setup", "pydantic.dataclasses", "pydantic.type_adapter", "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run of a program whose ranks run one by one."""

    program: Path
    arguments: Sequence[str]
    """Arguments of the program; ``{folder}`` stands for the rank's own folder."""
    world_size: int
    folder: Path
    """Parent of the folders of the ranks."""
    prepare: Prepare | None = None
    nothing_counts: bool = False
    """See ``memoryless``."""
    signal_in: int | None = None
    """The iteration in which the rank receives SIGTERM."""

    def folder_of(self, rank: int) -> Path:
        """The folder of ``rank``, for its output and checkpoints."""
        return self.folder / f"rank{rank}"


def extract(job: Job, ranks: Sequence[int], processes: int) -> Iterator[Trace]:
    """Run ``ranks`` and yield each trace when it is complete. Raises LaunchError if the program of a rank fails."""
    import_lazy_modules()
    for rank, trace, _, output in run_in_forks(ranks, partial(_trace, job), job.folder_of, processes):
        if trace is None or trace.exit_code not in (0, 75):
            raise LaunchError([f"rank {rank} does not run ({' '.join(job.arguments)}):", *output[-_SHOWN:]])
        yield trace


_SHOWN = 12
"""Number of last lines that are shown of the output of a failed rank."""


def import_lazy_modules() -> None:
    """Import modules that programs import lazily, so that not every forked rank imports them again."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else its import starts processes
    for module in _LAZY_IMPORTS:
        importlib.import_module(module)


def _trace(job: Job, rank: int) -> Trace:
    """Run the program as ``rank`` in this process, and record its communication."""
    gc.disable()  # the process is short-lived
    os.environ["DS_ACCELERATOR"] = "cuda"  # also on a machine without GPUs
    recorder = Recorder(rank, job.signal_in)
    with (
        one_rank(job.world_size, rank),
        memoryless(nothing_counts=job.nothing_counts, on_operation=recorder.buffers.on_operation),
        recording(recorder),
        patched(
            (SavedStates, "shard", state_without_files),
            (across_ranks, "check_states", lambda *_: {}),
            (across_ranks, "check_alike", lambda *_: None),
            (across_ranks, "check_copies", lambda *_: None),
        ),
    ):
        if job.prepare is not None:
            job.prepare(rank)
        arguments = [argument.replace("{folder}", str(job.folder_of(rank))) for argument in job.arguments]
        recorder.trace.exit_code = run_program(job.program, arguments)
    return recorder.trace


def gather(checkpoints: Sequence[Path], folder: Path, tensor_ranks: int) -> None:
    """Merge the ``checkpoints`` of single ranks into one checkpoint in ``folder``.

    Weight files of tensor-parallel ranks that were not run are links to the file of the first tensor-parallel rank,
    since DeepSpeed counts the files of a layer, and representatives may read any of them.
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
    """Replacement of ``SavedStates.shard`` that reads no files of ranks that were not run.

    The state has the keys of a tensor of rank 0: of the first one for matrices of layers, which Muon updates, and of
    the last one for other parameters.
    """
    saved, config = states.saved, states.config
    is_first = name in block_matrices(architecture_of(config), config)
    state = _state_of_rank_0(saved.path, saved.layout, is_first) if saved.has_optimizer else {}
    full = torch.zeros(tuple(shape), device=DEVICE)
    return {WEIGHT: full, **{key: full if is_flat(value) else value for key, value in state.items()}}


@cache
def _state_of_rank_0(path: Path, layout: SavedLayout, is_first: bool) -> dict[str, Any]:
    if layout.has_optimizer_partitions:
        state = read_file(optimizer_file(path, layout, 0, 0))["optimizer_state_dict"]
    else:
        state = read_file(model_file(path, layout, 0))["optimizer"]
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state
    return numbered_state(path, base, 0 if is_first else base["param_groups"][-1]["params"][-1])
