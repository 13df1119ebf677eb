"""Training callbacks that need the planner, the report or the elastic agent."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatron.config import RunConfig
from megatron.launch.rank import EXIT_CODE_FOLDER, TRAINED
from megatron.model.spec import architecture_of
from megatron.parallel.pipeline.schedule import InstructionHook
from megatron.tools.reporting.trackers import Trackers
from megatron.training.callbacks import Callback, MemoryPlan, warn_if_unwritable


def default_callbacks() -> list[Callback]:
    """What the entry scripts register. They import the planner and the report only when they are called."""
    return [RunRecord(), Trackers(), MemoryAdvice(), *([FirstIteration()] if EXIT_CODE_FOLDER in os.environ else [])]


class RunRecord(Callback):
    """Writes run.json to ``--run-dir``."""

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Write the configuration, the plan and the environment."""
        if run.observe.run_dir:
            from megatron.tools.reporting.files import RECORD, write_record

            with warn_if_unwritable(RECORD):
                write_record(run, device)


class FirstIteration(Callback):
    """Tells the elastic agent that rank 0 has trained the first iteration of a start."""

    def __init__(self) -> None:
        self._file: Path | None = None

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Rank 0 only."""
        self._file = Path(os.environ[EXIT_CODE_FOLDER], TRAINED)

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Leave the file after the first iteration."""
        yield ()
        if self._file is not None:
            with suppress(OSError):
                self._file.touch()
            self._file = None


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
    size, steps = run.train.micro_batch_size, run.train.gradient_accumulation_steps
    recomputing = replace(run.activation, checkpoint_activations=True, recompute_granularity="full")
    activations = {"": run.activation}
    if not run.activation.checkpoint_activations:
        activations["--checkpoint-activations"] = recomputing
    least, most = run.zero.zero_stage, 1 if run.parallel.uses_pipeline else 3
    stages = {"": least, **{f"--zero-stage {stage}": stage for stage in range(least + 1, most + 1)}}
    halves = [2**power for power in range(size.bit_length()) if size % 2**power == 0]
    for zero_flag, stage in stages.items():
        zero = replace(run.zero, zero_stage=stage)
        for recompute_flag, activation in activations.items():
            for parts in halves:
                train = replace(run.train, micro_batch_size=size // parts, gradient_accumulation_steps=steps * parts)
                batch_flags = f"--batch-size {size // parts} --gas {steps * parts}" if parts > 1 else ""
                if flags := " ".join(filter(None, (zero_flag, recompute_flag, batch_flags))):
                    yield flags, replace(run, activation=activation, zero=zero, train=train)
