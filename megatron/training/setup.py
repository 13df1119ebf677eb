"""Starts ranks and engine from a checked configuration, and logs the configuration and the start of a run."""

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.load import Loaded, load_checkpoint
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.tracker import replaces_others
from megatron.common.errors import ConfigError, counted, first_line, one_line
from megatron.config import RunConfig, flag_fields
from megatron.config.fields import flag_of
from megatron.engines import deepspeed_silenced
from megatron.engines.build import build_engine
from megatron.engines.engine import Engine
from megatron.engines.gradient_norm import counted_once, sum_over_model
from megatron.engines.state import optimizer_name
from megatron.launch.distributed import distributed
from megatron.launch.environment import describe_cuda
from megatron.launch.extensions import build_extensions, check_device, check_fp8
from megatron.launch.progress import ProgressState, record_into
from megatron.launch.rank_failure import rank_failure_monitor
from megatron.launch.watchdog import hang_watchdog
from megatron.model.spec import architecture_of
from megatron.ops.attention import device_facts
from megatron.ops.norm import uses_apex
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.chunks import BY_RANK, CHUNKS
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.training.callbacks import Callback
from megatron.training.learning_rates import annealing_lr
from megatron.training.memory import out_of_memory_reported
from megatron.training.metrics import MetricsLogger
from megatron.training.summary import describe_config, describe_stages


@contextmanager
def initialized_ranks(run: RunConfig, callbacks: Sequence[Callback]) -> Iterator[tuple[ParallelLayout, ProgressState]]:
    """Join the process group and seed this rank. Inside, lost ranks, hangs and out-of-memory errors end the run.

    Yields the layout with this rank's coordinates, and the progress state, which the training loop must keep up to
    date.
    """
    check_device(run.parallel.device, run.parallel.local_rank or 0)
    if run.model.fp8_format != "none":
        check_fp8(run.model.fp8_recipe, run.parallel.local_rank or 0)
    check_safe_modules(run.ds_config)
    build_extensions(run)
    record_into(os.environ, Path(run.checkpoint.save or "."))
    progress = ProgressState()
    with (
        distributed(run.parallel, same=_same_on_all_ranks(run), verbose=run.logging.verbose) as layout,
        rank_failure_monitor(progress),
        hang_watchdog(run, layout, progress),
        out_of_memory_reported(run, layout, progress, callbacks),
    ):
        model_parallel_manual_seed(run.train.seed, layout)
        yield layout, progress


def check_safe_modules(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``torch_autocast`` of a DeepSpeed config names what is no class of modules."""
    section = config.get("torch_autocast", {})
    for name in section.get("lower_precision_safe_modules", ()) if section.get("enabled") else ():
        package, _, class_ = name.rpartition(".")
        try:
            found, reason = getattr(importlib.import_module(package), class_), ""
        except Exception as error:  # the package may raise any
            found, reason = None, f" ({first_line(error)})"
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ConfigError(
                f"torch_autocast.lower_precision_safe_modules: {name} is no class of modules{reason}: write one such "
                "as torch.nn.Linear, or remove it"
            )


def _same_on_all_ranks(run: RunConfig) -> dict[str, Any]:
    """The command line without the names of files, which may be others on other hosts, and hashes of the files."""
    compared = {name for name, field in flag_fields().items() if flag_of(field).metavar not in _FILES}
    values = {
        f"--{name}": value
        for name, value in run.settings.items()
        if isinstance(value, bool | int | float) or name.replace("-", "_") in compared
    }
    return values | {"the hash of the data": run.data.data_hash, "the hash of the tokenizer": run.data.tokenizer_hash}


_FILES = ("DIR", "FILE", "PATH", "TRACE", "[WEIGHT] PREFIX ...")
"""How --help shows values that name files."""


def is_finished(saved: SavedRun, run: RunConfig, *, length_flag: str, evaluation_flag: str) -> bool:
    """Whether ``saved`` is from the last iteration of ``run``, so that nothing is left to train; printed on rank 0.

    ``length_flag`` is the flag that lengthens the run, by default the one that gave its length, and ``evaluation_flag``
    the flag for an evaluation without training.
    """
    last = run.train.train_iters
    if run.checkpoint.finetune or saved.iteration < last:
        return False
    if dist.get_rank() == 0:
        for problem in saved.newer_problems:
            print(f"> warning: {problem}")
        print(
            f"> already finished: {saved.path} is from iteration {saved.iteration} of {last}; to continue, increase "
            f"{length_flag or run.train.length_flag}; {evaluation_flag} evaluates it again",
            flush=True,
        )
    return True


def log_configuration(run: RunConfig, log: MetricsLogger, more: str = "") -> None:
    """Log layout, model, batch, schedule, device and the text ``more``."""
    rows = {
        **describe_config(run, device_facts(torch.device(get_accelerator().current_device_name()))),
        "device": f"{device_name()}, {counted(torch.get_num_threads(), 'thread')} per rank, torch {torch.__version__}",
        **({"settings": describe_cuda(os.environ)} if get_accelerator().device_name() == "cuda" else {}),
        "deepspeed": f"{deepspeed.__version__}; its config is printed by --explain",
    }
    log.info("\n".join(f"> {name:9} {text}" for name, text in rows.items()))
    if run.parallel.uses_pipeline and architecture_of(run.model).provider is None:
        log.info(describe_stages(run))
    log.text("config", json.dumps(dataclasses.asdict(run), indent=2))
    if more:
        log.info(more)


def start_engine(
    run: RunConfig,
    layout: ParallelLayout,
    saved: SavedRun | None,
    lock: FolderLock | None,
    log: MetricsLogger,
    *,
    settings: str,
    load_weights: Callable[[Engine], Loaded],
) -> tuple[Engine, Checkpointer, Loaded]:
    """Build the engine, load the checkpoint ``saved`` or, without one, call ``load_weights``; and log the start.

    Every rank must call it. ``settings`` is saved with each checkpoint.
    """
    with deepspeed_silenced(run.logging.verbose):
        engine = build_engine(run, layout, annealing_lr(run))
        checkpointer = Checkpointer(engine, run, log.info, saved, lock, settings)
        loaded = load_checkpoint(engine, run, layout, saved) if saved else load_weights(engine)
        checkpointer.prepare()
    _log_start(run, layout, engine, saved, loaded, log)
    return engine, checkpointer, loaded


def _log_start(
    run: RunConfig,
    layout: ParallelLayout,
    engine: DeepSpeedEngine,
    saved: SavedRun | None,
    loaded: Loaded,
    log: MetricsLogger,
) -> None:
    """Log parameters, optimizer, the loaded checkpoint and the first iteration."""
    log.info(_describe_model(engine.module, layout))
    norm = "apex" if uses_apex(run.model.fused_kernels) else "torch"
    log.info(f"> optimizer {optimizer_name(engine.basic_optimizer)}; layer norm of {norm}")
    if run.parallel.tp_comm_overlap:
        method = "through symmetric memory" if layout.forward_chunks == BY_RANK else f"in {CHUNKS} chunks"
        log.info(f"> forward matmuls of tensor-parallel layers communicate {method}")
    for remark in loaded.remarks:
        log.info(f"> {one_line(remark)}")
    if replaces_others(run, saved):
        save = run.checkpoint.save
        log.info(
            f"> warning: --save {save} holds checkpoints that this run does not continue; it replaces those of the same"
            " iterations: name another folder to keep them"
        )
    if saved:
        for problem in saved.newer_problems:
            log.info(f"> warning: {problem}")
        log.info(f"> loaded {saved.path}; resuming after iteration {loaded.iteration}")
    elif run.checkpoint.load_hf:
        log.info("> starting at iteration 0")
    elif run.checkpoint.auto_resume:
        log.info(f"> {run.checkpoint.save} holds no checkpoint yet: a fresh start")
    elif run.checkpoint.load:
        log.info(f"> {run.checkpoint.load} holds no checkpoint yet and is also --save: a fresh start")
    else:
        log.info("> a fresh start")


def device_name() -> str:
    """The device of this rank, such as ``cpu`` or ``cuda (NVIDIA H100)``."""
    device = get_accelerator().device_name()
    return device if device == "cpu" else f"{device} ({torch.get_device_module(device).get_device_name()})"


def _describe_model(module: nn.Module, layout: ParallelLayout) -> str:
    """Number of parameters: in total, trained, and on each rank of the first data-parallel replica."""
    device = get_accelerator().current_device_name()
    counts = torch.zeros(2, 2, dtype=torch.int64)  # [frozen or trained, dense or expert]
    for parameter in counted_once(module.parameters(), layout):
        counts[int(parameter.requires_grad), int(is_moe_param(parameter))] += _numel(parameter)
    frozen, trained = (int(sum_over_model(row, layout)) for row in counts.to(device))
    local = torch.tensor(sum(map(_numel, module.parameters())), device=device)
    per_rank = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(per_rank, local)
    replica = layout.topology.filter_match(data=0)
    ranks = ", ".join(f"rank {rank} {int(per_rank[rank]):,}" for rank in replica[:8])
    more = f", and {len(replica) - 8} more" if len(replica) > 8 else ""
    some = f", {trained:,} of them trained" if frozen else ""
    return f"> parameters {frozen + trained:,} in total, padding included{some}; {ranks}{more}"


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3 the local parameter is empty
