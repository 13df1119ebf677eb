"""Reports an out-of-memory error in one line: bytes requested, free and planned, and settings that would fit."""

import gc
import mmap
import pickle
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megatron.common.errors import ResourceError, is_out_of_memory
from megatron.common.files import replace_file
from megatron.config import RunConfig
from megatron.launch.progress import ProgressState
from megatron.parallel.layout import ParallelLayout
from megatron.training.callbacks import Callback, MemoryPlan, warn_if_unwritable

_GB = 1e9
_SHOWN = 30
"""Number of kinds of tensors in the report."""
_RESERVE = 2**26
"""Bytes reserved for writing the report: address space only, since no page is touched."""
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@contextmanager
def out_of_memory_reported(
    run: RunConfig, layout: ParallelLayout, progress: ProgressState, callbacks: Sequence[Callback]
) -> Iterator[None]:
    """Turn an out-of-memory error inside into a ResourceError, and list the live tensors in memory-rankN.txt."""
    if (run.observe.trace is not None or run.observe.profiles) and get_accelerator().device_name() == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)  # so that the snapshot shows stack traces
    before = _allocated()
    reserve = mmap.mmap(-1, _RESERVE)
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        free, allocated = _free(), _allocated() - before
        reserve.close()
        stage = layout.topology.get_coord(layout.rank).pipe
        plans = (callback.on_out_of_memory(run, stage, free + allocated) for callback in callbacks)
        plan = next(filter(None, plans), None)
        message = _message(progress, str(error), free, allocated, plan)
        raise ResourceError(_write_report(run, layout.rank, message, plan)) from error


def _message(progress: ProgressState, error: str, free: int, allocated: int, plan: MemoryPlan | None) -> str:
    where = f"{progress.phase}, iteration {progress.iteration}" if progress.phase else "the start of the run"
    match = _REQUESTED.search(error)
    requested = f"{float(match[1]) * _UNITS[match[2].lower()] / _GB:.3g} GB were requested, " if match else ""
    bytes_known = f"{requested}{free / _GB:.3g} GB are free; this rank holds {allocated / _GB:.3g} GB"
    text = f"out of memory in {where}: {bytes_known}"
    if plan is None:
        return f"{text}; tools/plan.py shows what would fit"
    return f"{text}, and was planned to hold {plan.total / _GB:.3g} GB at its peak; {plan.advice}"


def _write_report(run: RunConfig, rank: int, message: str, plan: MemoryPlan | None) -> str:
    """Write memory-rankN.txt. Returns ``message``, with the path of the file if it could be written."""
    file = Path(run.observe.profile_dir or run.observe.run_dir or run.checkpoint.save or ".") / f"memory-rank{rank}.txt"
    with warn_if_unwritable("the list of tensors"):
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [message, ""]
        if plan is not None:
            rows += ["planned, GB", *_rows(plan.parts.items()), ""]
        rows += ["tensors of this rank by shape and type, GB", *_rows(_live_tensors().most_common(_SHOWN))]
        with replace_file(file, text=True, durable=False) as report:
            report.write("\n".join(rows) + "\n")
        if get_accelerator().device_name() == "cuda":
            with replace_file(file.with_suffix(".pickle"), durable=False) as snapshot:
                pickle.dump(torch.cuda.memory._snapshot(), snapshot)
        return f"{message}; see {file}"
    return message


def _rows(sizes: Iterable[tuple[object, float]]) -> Iterator[str]:
    return (f"{size / _GB:10.4f}  {key}" for key, size in sizes)


def _allocated() -> int:
    """Bytes that this rank has allocated on the device, or on CPU the resident memory of the process."""
    accelerator = get_accelerator()
    return psutil.Process().memory_info().rss if accelerator.device_name() == "cpu" else accelerator.memory_allocated()


def _free() -> int:
    """Bytes that this rank could still allocate."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        return torch.cuda.mem_get_info()[0]  # DeepSpeed needs integers in CUDA_VISIBLE_DEVICES
    if accelerator.device_name() != "cpu":
        return accelerator.available_memory()
    limits = [psutil.virtual_memory().available, *_free_in_container()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - psutil.Process().memory_info().vms)
    return max(min(limits), 0)


def _free_in_container() -> list[int]:
    """Bytes left below the memory limit of the container, if there is one."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return []
    return [int(limit) - int(used)] if limit.isdigit() else []


def _live_tensors() -> Counter[tuple]:
    """Bytes of the live tensors by shape, dtype and device; each storage is counted once."""
    sizes: Counter[tuple] = Counter()
    seen = set()
    for candidate in gc.get_objects():  # isinstance would ask objects of torch for their class, which warn
        if not issubclass(type(candidate), torch.Tensor) or candidate.layout != torch.strided:
            continue
        with suppress(RuntimeError):  # a tensor of the compiler has no data
            storage = candidate.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                key = (*candidate.shape, str(candidate.dtype), candidate.device.type)
                sizes[key] += storage.nbytes()
    return sizes
