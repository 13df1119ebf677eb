"""From a checked configuration to ranks that can train, and what a run logs about itself before it starts."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from megatron.checkpoint.load import Loaded
from megatron.checkpoint.run_file import SavedRun
from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.engines import warn_if_untested_version
from megatron.engines.state import optimizer_name
from megatron.launch.distributed import distributed
from megatron.launch.extensions import build_extensions, check_device
from megatron.launch.flight_recorder import record_into
from megatron.launch.progress import ProgressState
from megatron.launch.rank_failure import rank_failure_monitor
from megatron.launch.watchdog import hang_watchdog
from megatron.model.spec import architecture_of
from megatron.ops.apex import uses_apex
from megatron.ops.cuda import device_facts
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.training.callbacks import Callback
from megatron.training.memory import out_of_memory_reported
from megatron.training.metrics import MetricsLogger
from megatron.training.summary import describe_config, describe_stages


@contextmanager
def initialized_ranks(run: RunConfig, callbacks: Sequence[Callback]) -> Iterator[tuple[ParallelLayout, ProgressState]]:
    """Join the process group and seed this rank. While inside, lost and hung ranks and full memory end the run.

    Yields this rank's place in the layout, and the progress state, which the training loop has to keep up to date.
    """
    check_device(run.parallel.device, run.parallel.local_rank or 0)
    build_extensions(run)
    record_into(os.environ, Path(run.checkpoint.save or "."))
    progress = ProgressState()
    with (
        distributed(run.parallel, verbose=run.logging.verbose) as layout,
        rank_failure_monitor(progress),
        hang_watchdog(run, layout, progress),
        out_of_memory_reported(run, layout, progress, callbacks),
    ):
        warn_if_untested_version(is_main_rank=layout.rank == 0)
        model_parallel_manual_seed(run.train.seed, layout)
        yield layout, progress


def is_finished(
    saved: SavedRun, run: RunConfig, *, length_flag: str = "", evaluation_flag: str = "--skip-train"
) -> bool:
    """Whether ``run`` would resume from the checkpoint ``saved`` after its last iteration; printed on rank 0.

    The flags are those that lengthen the run, and that evaluate without training.
    """
    last = run.train.train_iters
    if run.checkpoint.finetune or saved.iteration < last:
        return False
    if dist.get_rank() == 0:
        length = length_flag or ("--train-iters" if run.train.train_samples is None else "--train-samples")
        print(
            f"> already finished: {saved.path} is from iteration {saved.iteration} of {last}; to continue, increase "
            f"{length}; {evaluation_flag} evaluates it again",
            flush=True,
        )
    return True


def log_configuration(run: RunConfig, log: MetricsLogger, callbacks: Sequence[Callback]) -> None:
    """Log layout, model, batch, schedule, device and the compiled DeepSpeed config; pass the run to the callbacks."""
    rows = {
        **describe_config(run, device_facts(torch.device(get_accelerator().current_device_name()))),
        "device": f"{_device_name()}, {counted(torch.get_num_threads(), 'thread')} per rank, torch {torch.__version__}",
        "deepspeed": f"{deepspeed.__version__}; its config is printed by --explain",
    }
    log.info("\n".join(f"> {name:9} {text}" for name, text in rows.items()))
    if run.parallel.uses_pipeline and architecture_of(run.model).provider is None:
        log.info(describe_stages(run))
    log.text("config", json.dumps(dataclasses.asdict(run), indent=2))
    if dist.get_rank() == 0:
        for callback in callbacks:
            callback.on_run_start(run, _device_name())


def log_start(
    run: RunConfig,
    layout: ParallelLayout,
    engine: DeepSpeedEngine,
    saved: SavedRun | None,
    loaded: Loaded,
    log: MetricsLogger,
) -> None:
    """Log parameters, optimizer, the loaded checkpoint and the first iteration. Every rank must call it."""
    log.info(_describe_model(engine.module, layout))
    norm = "apex" if uses_apex(run.model.fused_kernels) else "torch"
    log.info(f"> optimizer {optimizer_name(engine.basic_optimizer)}; layer norm of {norm}")
    for remark in loaded.remarks:
        log.info(f"> {remark}")
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


def _device_name() -> str:
    """The device of this rank, such as ``cpu`` or ``cuda (NVIDIA H100)``."""
    device = get_accelerator().device_name()
    return device if device == "cpu" else f"{device} ({torch.get_device_module(device).get_device_name()})"


def _describe_model(module: nn.Module, layout: ParallelLayout) -> str:
    """Number of parameters, in total and on each rank of the first data-parallel replica; and how many are trained."""
    held = sum(_numel(p) for p in module.parameters())
    unique = [
        p
        for p in module.parameters()
        if not getattr(p, "ds_pipe_replicated", False)
        and (getattr(p, "model_parallel", False) or layout.tensor_group.rank() == 0)
        and (layout.sequence_group is None or layout.sequence_group.rank() == 0)
    ]
    experts = 1 if layout.expert_group is None else layout.expert_group.size()
    numbers = [_numel(p) * (experts if is_moe_param(p) else 1) for p in unique]
    trained = sum(number for number, p in zip(numbers, unique, strict=True) if p.requires_grad)
    counts = torch.tensor([held, sum(numbers), trained], device=get_accelerator().current_device_name())
    of_ranks = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, counts)
    replica = [rank for rank in range(len(of_ranks)) if layout.topology.get_coord(rank).data == 0]
    total, trained = (sum(int(of_ranks[rank][column]) for rank in replica) for column in (1, 2))
    ranks = ", ".join(f"rank {rank} {int(of_ranks[rank][0]):,}" for rank in replica[:8])
    more = f", and {len(replica) - 8} more" if len(replica) > 8 else ""
    some = f", {trained:,} of them trained" if trained < total else ""
    return f"> parameters {total:,} in total, padding included{some}; {ranks}{more}"


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3 the local parameter is empty
