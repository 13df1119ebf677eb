"""Training callbacks that need the planner, the report or the supervisor: advice on memory, run.json, start times."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace

from megatron.checkpoint.folder_lock import start_time
from megatron.config import RunConfig
from megatron.launch.rank import EXIT_CODE_FOLDER
from megatron.model.spec import architecture_of
from megatron.parallel.pipeline.schedule import InstructionHook
from megatron.training.callbacks import Callback, MemoryPlan, warn_if_unwritable


def default_callbacks() -> list[Callback]:
    """What the entry scripts register. They import the planner and the report only when they are called."""
    return [RunRecord(), MemoryAdvice(), *([StartTimes()] if EXIT_CODE_FOLDER in os.environ else [])]


class RunRecord(Callback):
    """Writes run.json to ``--run-dir``."""

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Write the configuration, the plan and the environment."""
        if run.observe.run_dir:
            from megatron.tools.reporting.files import RECORD, write_record

            with warn_if_unwritable(RECORD):
                write_record(run, device)


class StartTimes(Callback):
    """Reports to a supervisor how long rank 0 has taken to its first iteration, and for what."""

    def __init__(self) -> None:
        self._joined: float | None = None

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """All ranks are connected."""
        self._joined = _age()

    def around_iteration(self, iteration: int) -> AbstractContextManager[Sequence[InstructionHook]]:
        """The first time on rank 0: the engine is there, and at the end an iteration is trained."""
        joined, self._joined = self._joined, None
        return nullcontext(()) if joined is None else self._first_iteration(joined)

    @contextmanager
    def _first_iteration(self, joined: float) -> Iterator[Sequence[InstructionHook]]:
        from megatron.tools.cluster.recovery import Ages, write_started

        loaded = _age()
        yield ()
        with suppress(OSError):
            write_started(Ages(joined, loaded, _age()))


def _age() -> float:
    """Seconds since this process was started; 0 if the system does not report it."""
    ticks = start_time(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


class MemoryAdvice(Callback):
    """Reports what was planned for a rank that ran out of memory, and the smallest change that would fit."""

    def on_out_of_memory(self, run: RunConfig, stage: int, available: float) -> MemoryPlan | None:
        """The planner's figures for a rank of ``stage``, and its advice; None without a spec of the model."""
        if architecture_of(run.model).provider is not None:
            return None
        from megatron.tools.planning.memory import stage_memory

        memory = stage_memory(run)[stage]
        return MemoryPlan(memory.total, memory.parts(), smallest_change(run, stage, available))


def smallest_change(run: RunConfig, stage: int, available: float) -> str:
    """The smallest change of the flags that by plan lets a rank of ``stage`` need at most ``available`` bytes."""
    from megatron.cli.validation import violations
    from megatron.tools.planning.memory import stage_memory

    for flags, changed in _changes(run):
        needed = stage_memory(changed)[stage].total
        if needed <= available and not violations(changed):
            return f"{flags} would take {needed / 1e9:.3g} GB"
    return "no smaller micro-batch, recomputation or ZeRO stage would fit: use more ranks; tools/plan.py says how many"


def _changes(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes of ``run`` that keep the global batch and the number of ranks, the smallest first."""
    recomputing = replace(run.activation, checkpoint_activations=True, recompute_granularity="full")
    recomputations = [("", run)]
    if not run.activation.checkpoint_activations:
        recomputations.append(("--checkpoint-activations", replace(run, activation=recomputing)))
    for stage in range(run.zero.zero_stage, 2 if run.parallel.uses_pipeline else 4):
        for recompute_flag, recomputed in recomputations:
            staged = replace(recomputed, zero=replace(run.zero, zero_stage=stage))
            for size in _halves(run.train.micro_batch_size):
                steps = run.train.gradient_accumulation_steps * (run.train.micro_batch_size // size)
                train = replace(run.train, micro_batch_size=size, gradient_accumulation_steps=steps)
                zero_flag = f"--zero-stage {stage}" if stage > run.zero.zero_stage else ""
                batch_flags = f"--batch-size {size} --gas {steps}" if size < run.train.micro_batch_size else ""
                flags = " ".join(filter(None, (zero_flag, recompute_flag, batch_flags)))
                if flags:
                    yield flags, replace(staged, train=train)


def _halves(size: int) -> Iterator[int]:
    while size:
        yield size
        size = size // 2 if size % 2 == 0 else 0
