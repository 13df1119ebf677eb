"""Out of memory: one line with what was asked for, what there is and what was planned, and what would fit."""

import gc
import os
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from megatron.config import RunConfig
from megatron.config.errors import ResourceError
from megatron.config.validation import violations
from megatron.launch.progress import ProgressState
from megatron.parallel.layout import ParallelLayout
from megatron.tools.planning.memory import Memory, stage_memory
from megatron.training.optional_files import unless_refused

_GB = 1e9
_SHOWN = 30
_RESERVE = 2**26
"""Bytes kept to say what happened with. Nobody writes to them, so that they take address space alone."""
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@contextmanager
def exhaustion_named(run: RunConfig, layout: ParallelLayout, progress: ProgressState) -> Iterator[None]:
    """Turn the end of the memory inside into a ResourceError, and leave what filled it in memory-rankN.txt."""
    if run.observe.traces_or_profiles and get_accelerator().device_name() == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)  # so that the snapshot says who allocated
    before = _held()
    reserve = bytearray(_RESERVE)
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
        if not is_exhaustion(error):
            raise
        free, held = _free(), _held() - before
        del reserve
        raise ResourceError(_explain(run, layout, progress, str(error), free, held)) from error


def is_exhaustion(error: Exception) -> bool:
    """Whether ``error`` says that there is no more memory, of the device or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _explain(run: RunConfig, layout: ParallelLayout, progress: ProgressState, said: str, free: int, held: int) -> str:
    stage = layout.topology.get_coord(layout.rank).pipe
    planned = stage_memory(run)[stage]
    where = f"{progress.phase}, iteration {progress.iteration}" if progress.phase else "the start of the run"
    parts = [
        f"out of memory in {where}: {_asked(said)}{free / _GB:.3g} GB are free",
        f"this rank holds {held / _GB:.3g} GB, and at its peak was planned to hold {planned.total / _GB:.3g} GB",
        smallest_change(run, stage, free + held),
    ]
    file = _folder(run) / f"memory-rank{layout.rank}.txt"
    with unless_refused(str(file)):
        _write_snapshot(file, "; ".join(parts), planned)
        parts.append(f"see {file}")
    return "; ".join(parts)


def smallest_change(run: RunConfig, stage: int, room: float) -> str:
    """What to change least, by plan, for a rank of ``stage`` to need no more than ``room`` bytes."""
    for words, changed in _changes(run):
        needed = stage_memory(changed)[stage].total
        if needed <= room and not violations(changed):
            return f"{words} would take {needed / _GB:.3g} GB"
    return "no smaller micro-batch, recomputation or ZeRO stage would fit: use more ranks; tools/plan.py says how many"


def _changes(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes of ``run`` that leave the global batch and the ranks as they are, the least first."""
    whole = replace(run.activation, checkpoint_activations=True, recompute_granularity="full")
    kept = [("", run)]
    if not run.activation.checkpoint_activations:
        kept.append(("--checkpoint-activations", replace(run, activation=whole)))
    for stage in range(run.zero.zero_stage, 2 if run.parallel.uses_pipeline else 4):
        for words, changed in kept:
            staged = replace(changed, zero=replace(run.zero, zero_stage=stage))
            sharded = f"--zero-stage {stage}" if stage > run.zero.zero_stage else ""
            for part in _halves(run.train.micro_batch_size):
                train = replace(
                    run.train,
                    micro_batch_size=part,
                    gradient_accumulation_steps=run.train.gradient_accumulation_steps
                    * (run.train.micro_batch_size // part),
                )
                cut = f"--batch-size {part} --gas {train.gradient_accumulation_steps}"
                said = [word for word in (sharded, words, cut if part < run.train.micro_batch_size else "") if word]
                if said:
                    yield " ".join(said), replace(staged, train=train)


def _halves(size: int) -> Iterator[int]:
    while size:
        yield size
        size = size // 2 if size % 2 == 0 else 0


def _asked(said: str) -> str:
    found = _ASKED.search(said)
    return f"{float(found[1]) * _UNITS[found[2].lower()] / _GB:.3g} GB were asked for, " if found else ""


def _held() -> int:
    """Bytes that this rank has: of the device's memory, or on CPU all of the process."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.memory_allocated()
    return _statm(1)


def _statm(column: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")


def _free() -> int:
    """Bytes that this rank could still have."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.available_memory()
    limits = [_meminfo("MemAvailable"), *_of_cgroup()]
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        limits.append(most - _statm(0))
    return max(min(limits), 0)


def _meminfo(name: str) -> int:
    row = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(row.split()[1]) * 1024


def _of_cgroup() -> list[int]:
    """What the container, if this is one, leaves."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return []
    return [int(limit) - int(used)] if limit.isdigit() else []


def _folder(run: RunConfig) -> Path:
    return Path(run.observe.profile_dir or run.observe.run_dir or run.checkpoint.save or ".")


def _write_snapshot(file: Path, said: str, planned: Memory) -> None:
    """What was planned, and which tensors there are; on CUDA, what torch's viewer of memory shows as well."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [said, "", "planned, GB", *_rows(planned.parts().items(), lambda name: name)]
    tensors = _tensors()
    rows += ["", "tensors of this rank by shape and type, GB", *_rows(tensors.most_common(_SHOWN), str)]
    file.write_text("\n".join(rows) + "\n")
    if get_accelerator().device_name() == "cuda":
        torch.cuda.memory._dump_snapshot(str(file.with_suffix(".pickle")))


def _rows(sizes: Iterator[tuple], name: Callable) -> Iterator[str]:
    return (f"{size / _GB:10.4f}  {name(key)}" for key, size in sizes)


def _tensors() -> Counter[tuple]:
    """Bytes of the tensors that are alive, by shape and type; each storage once."""
    found: Counter[tuple] = Counter()
    seen = set()
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[(*thing.shape, str(thing.dtype), thing.device.type)] += storage.nbytes()
    return found
