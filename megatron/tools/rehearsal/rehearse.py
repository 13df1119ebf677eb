"""Rehearses ranks of a run, and layouts of a plan, in subprocesses that import torch. No torch here."""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.cli import read_run
from megatron.common.environment import expected_device
from megatron.common.errors import ConfigError, LaunchError, ResourceError, UserError
from megatron.common.formats import duration, with_prefix
from megatron.config import RunConfig
from megatron.config.fields import whole_numbers
from megatron.config.output import CheckpointConfig, ObserveConfig
from megatron.model.partition import plan
from megatron.model.spec import ArchitectureSpec
from megatron.tools.one_rank import rank_environment
from megatron.tools.one_rank.processes import RankResult, run_in_forks
from megatron.tools.planning.output import aligned, layout_of
from megatron.tools.planning.search import Candidate
from megatron.tools.rehearsal.estimate import Expected

WARM_UP = 3
"""Iterations before the timed ones, in which buffers are allocated and DeepSpeed records the order of layers."""
PHASED = 3
"""Iterations whose phases are timed, with a wait for the device around each."""
MEASURED = 1
"""Iterations whose peak of memory is measured."""
COUNTED = 1
"""Iterations whose operations are counted; they come last, since layers run uncompiled in them."""


@dataclass(frozen=True)
class Rehearsal:
    """The run to rehearse, and what to measure."""

    arguments: Sequence[str]
    """Arguments of the training program."""
    architecture: ArchitectureSpec
    world_size: int
    per_node: int
    """Ranks per host."""
    steps: int
    """Number of timed iterations."""
    fake: bool
    """Whether tensors are fake, without memory and computation; then nothing is timed."""

    def environ(self, rank: int) -> dict[str, str]:
        """The environment variables of ``rank`` of the run, on the first device of this host."""
        store = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # so that rank 0 starts no TCPStore server
        return rank_environment(self.world_size, rank, self.per_node) | store

    def run(self, environ: Mapping[str, str]) -> RunConfig:
        """The configuration of the run in the environment ``environ``. Raises ConfigError."""
        run = read_run(self.arguments, environ, self.architecture).checked()
        if run.logging.explain or run.logging.dry_run:
            raise ConfigError("--explain and --dry-run start nothing, and there is nothing to rehearse: remove them")
        if run.train.train_iters <= self.iterations:
            raise ConfigError(
                f"--train-iters {run.train.train_iters} must be more than the {self.iterations} that are rehearsed"
            )
        return run

    @property
    def timed(self) -> int:
        """Number of timed iterations."""
        return 0 if self.fake else self.steps

    @property
    def iterations(self) -> int:
        """Number of all iterations of a rehearsal."""
        return WARM_UP + (self.timed and self.timed + PHASED) + MEASURED + COUNTED


def shortened(run: RunConfig, iterations: int) -> RunConfig:
    """``run`` for the first iterations, without evaluations, checkpoints and reports.

    Learning-rate schedule, data order and the work of an iteration stay the same. Non-finite numbers do not end it:
    without the contributions of other ranks, norms in deep models may divide by tiny numbers.
    """
    return replace(
        run,
        train=replace(
            run.train, exit_interval=iterations, exit_duration_in_mins=None, eval_iters=0, skip_train=False,
            rewind_on_spike=False, max_consecutive_bad_steps=iterations + 1,
        ),
        checkpoint=CheckpointConfig(),
        logging=replace(
            run.logging, log_interval=10**9, tensorboard_dir=None, metrics_file=None, straggler_report=None,
            watchdog_minutes=None,
        ),
        observe=ObserveConfig(),
    )  # fmt: skip


def representative_ranks(run: RunConfig) -> list[int]:
    """The first rank of each kind of pipeline stage: first, last, and middle stages with different layers."""
    stages = run.parallel.pipe_stages
    stage_ranks = run.parallel.world_size // stages
    kinds: dict[tuple, int] = {}
    for number, stage in enumerate(plan(run)):
        position = "first" if number == 0 else "last" if number == stages - 1 else "middle"
        kinds.setdefault((position, stage.parameters, stage.num_blocks), number)
    return [number * stage_ranks for number in kinds.values()]


def ranks_of_text(text: str, run: RunConfig) -> list[int]:
    """The ranks of ``--ranks``. Raises ConfigError."""
    if text == "representative":
        return representative_ranks(run)
    try:
        return check_ranks(whole_numbers(text), run)
    except ValueError:
        raise ConfigError(f"--ranks {text}: write numbers such as 0,9, or representative") from None


def check_ranks(ranks: list[int], run: RunConfig) -> list[int]:
    """``ranks`` without duplicates. Raises ConfigError for a rank that is not in the run."""
    if absent := [rank for rank in ranks if not 0 <= rank < run.parallel.world_size]:
        raise ConfigError(f"rank {absent[0]} is not in a run of --world-size {run.parallel.world_size}")
    return list(dict.fromkeys(ranks))


def checked_run(rehearsal: Rehearsal) -> RunConfig:
    """The configuration of the run, checked with its data and vocabulary. Raises UserError."""
    environ = {**os.environ, **rehearsal.environ(0), "DS_ACCELERATOR": expected_device(os.environ)}
    run = rehearsal.run(environ)
    from megatron.training.preflight import check

    if rehearsal.fake:  # do not compare sizes with the memory of this host
        run = replace(run, logging=replace(run.logging, dry_run=True))
    run, _ = check(run)
    return replace(run, logging=replace(run.logging, dry_run=False))


def rehearse_ranks(rehearsal: Rehearsal, ranks: Sequence[int], program: Path) -> Iterator[dict[str, Any]]:
    """Rehearse ``ranks`` and yield the measurements of each. Raises UserError if one fails."""

    def rehearse_one(number: int) -> dict[str, Any]:
        os.environ.update(rehearsal.environ(number))
        from megatron.launch.environment import prepare_environment

        prepare_environment(os.environ)  # before torch is imported
        from megatron.tools.rehearsal.rank import rehearse

        measurements = rehearse(rehearsal, number, program)
        if code := measurements.pop("exit_code"):
            sys.exit(code)
        return measurements

    with tempfile.TemporaryDirectory(prefix="rehearse.", ignore_cleanup_errors=True) as folder:
        for rank_result in run_in_forks(ranks, rehearse_one, lambda rank: Path(folder, str(rank))):
            yield _measurements(rank_result)


_SHOWN = 40
"""Number of last lines that are shown of the output of a program that fails without a UserError."""


def _measurements(rank_result: RankResult) -> dict[str, Any]:
    """The result of a rank. Raises UserError if it failed."""
    number, result, code, output = rank_result
    if result is not None:
        return result
    if code < 0:
        raise ResourceError(
            f"the rehearsal of rank {number} was ended by signal {-code}, perhaps because memory ran out: rehearse a "
            "layout that needs less (tools/plan.py), or rehearse this one with --fake"
        )
    kinds = {kind.exit_code: kind for kind in UserError.__subclasses__()}
    errors = [line for line in output if "error: " in line] or [*output[-_SHOWN:], f"ended with exit code {code}"]
    raise kinds.get(code, LaunchError)([f"rank {number}: {line.partition('error: ')[2] or line}" for line in errors])


class Rehearsed(NamedTuple):
    """A layout and the expected step of its rehearsed ranks."""

    number: int
    """Row of the layout in the plan, counted from 1."""
    candidate: Candidate
    expected: Expected | None
    """None if this machine has too little memory for a rank."""

    @property
    def peak(self) -> int:
        """Maximum of the ranks' peaks of memory, in bytes."""
        ranks = self.expected.ranks if self.expected else ()
        return max((rank["memory_bytes"]["peak"] for rank in ranks), default=0)


def rehearse_layouts(candidates: Sequence[Candidate], program: Path, steps: int) -> Iterator[Rehearsed]:
    """Rehearse a rank of each kind of stage of each layout. Raises UserError if the program cannot be started."""
    for number, candidate in enumerate(candidates, 1):
        request = candidate.request
        rehearsal = Rehearsal(
            candidate.command, request.architecture, request.devices, request.machine.per_node, steps, fake=False
        )
        run = checked_run(rehearsal)
        try:
            ranks = list(rehearse_ranks(rehearsal, representative_ranks(run), program))
        except ResourceError:
            yield Rehearsed(number, candidate, None)
        else:
            yield Rehearsed(number, candidate, Expected(run, request.machine, ranks))


def ranked(layouts: Sequence[Rehearsed]) -> list[str]:
    """A table of ``layouts``, sorted by expected step."""
    fastest = sorted(layouts, key=lambda layout: layout.expected.seconds if layout.expected else float("inf"))
    return aligned([("row", "TP", "PP", "DP", "ZeRO", "micro", "planned step", "expected step", "between",
                     "planned memory", "peak memory"), *map(_row, fastest)])  # fmt: skip


def _row(rehearsed: Rehearsed) -> tuple[str, ...]:
    layout, planned = layout_of(rehearsed.candidate), rehearsed.candidate
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "zero_stage", "micro_batch_size")
    sizes = [str(rehearsed.number), *(str(layout[name]) for name in names), duration(planned.timing.total)]
    memory = with_prefix(planned.memory.total, "B")
    if rehearsed.expected is None:
        return (*sizes, "out of memory here", "", memory, "")
    low, high = rehearsed.expected.between
    between = f"{duration(low)} to {duration(high)}"
    excess = "" if rehearsed.peak <= planned.request.room else " (too much)"
    return (*sizes, duration(rehearsed.expected.seconds), between, memory, with_prefix(rehearsed.peak, "B") + excess)
