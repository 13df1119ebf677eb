"""Rehearse ranks of a run, each in a process of its own, which imports torch; and layouts of a plan, by their steps.

Which ranks of which run, and how long. No torch here.
"""

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
from megatron.common.units import duration, with_prefix
from megatron.config import RunConfig
from megatron.config.output import CheckpointConfig, ObserveConfig
from megatron.model.partition import plan
from megatron.model.spec import ArchitectureSpec
from megatron.tools.one_rank import rank_environment
from megatron.tools.one_rank.processes import RankResult, run_in_forks
from megatron.tools.planning.output import aligned, layout_of
from megatron.tools.planning.search import Candidate
from megatron.tools.rehearsal.estimate import Expected

WARM_UP = 3
"""Iterations before the timed ones: buffers are made, and DeepSpeed records the order of layers."""
PHASED = 3
"""Iterations whose phases are timed, with a wait for the device around each."""
MEASURED = 1
"""Iterations whose peak of memory is measured."""
COUNTED = 1
"""Iterations whose operations are counted: the last, since layers are not compiled in it."""


@dataclass(frozen=True)
class Rehearsal:
    """A run of which single ranks are rehearsed."""

    words: Sequence[str]
    """Arguments of the training program."""
    architecture: ArchitectureSpec
    world_size: int
    per_node: int
    """Ranks of a host."""
    steps: int
    """Timed iterations."""
    fake: bool
    """Whether tensors are fake: without memory and computation, so nothing is timed."""

    def environ(self, rank: int) -> dict[str, str]:
        """The environment variables of ``rank`` of the run, on the first device of this host."""
        store = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # so that rank 0 listens for no other host
        return rank_environment(self.world_size, rank, self.per_node) | store

    def run(self, environ: Mapping[str, str]) -> RunConfig:
        """The run, as ``environ(..)`` configures it. Raises ConfigError."""
        run = read_run(self.words, environ, self.architecture).checked()
        if run.logging.explain or run.logging.dry_run:
            raise ConfigError("--explain and --dry-run start nothing, and there is nothing to rehearse: remove them")
        if run.train.train_iters <= self.iterations:
            raise ConfigError(
                f"--train-iters {run.train.train_iters} must be more than the {self.iterations} that are rehearsed"
            )
        return run

    @property
    def timed(self) -> int:
        """Timed iterations."""
        return 0 if self.fake else self.steps

    @property
    def iterations(self) -> int:
        """All iterations of a rehearsal."""
        return WARM_UP + (self.timed and self.timed + PHASED) + MEASURED + COUNTED


def shortened(run: RunConfig, iterations: int) -> RunConfig:
    """``run`` for the first iterations, without evaluations, checkpoints and reports.

    The schedule of the learning rate, the order of the data and everything that an iteration does stay the same. That
    numbers become too large does not end it: without the other ranks' parts, norms of deep models divide by little.
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
    """A rank of each class: of the first, the last, and of stages between them one of each with other layers.

    Of a stage it is the last rank of the first replica, which like most has others before it in each group.
    """
    stages = run.parallel.pipe_stages
    of_stage = run.parallel.world_size // stages
    seen: dict[tuple, int] = {}
    for number, stage in enumerate(plan(run)):
        place = "first" if number == 0 else "last" if number == stages - 1 else "middle"
        seen.setdefault((place, stage.parameters, stage.num_blocks), number)
    return [number * of_stage for number in seen.values()]


def ranks_of_text(text: str, run: RunConfig) -> list[int]:
    """The ranks of ``--ranks``. Raises ConfigError."""
    if text == "representative":
        return representative_ranks(run)
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f"--ranks {text}: write numbers such as 0,9, or representative")
    return check_ranks(list(map(int, parts)), run)


def check_ranks(ranks: list[int], run: RunConfig) -> list[int]:
    """``ranks`` without repetition. Raises ConfigError for one that is not in the run."""
    if absent := [rank for rank in ranks if not 0 <= rank < run.parallel.world_size]:
        raise ConfigError(f"rank {absent[0]} is not in a run of --world-size {run.parallel.world_size}")
    return list(dict.fromkeys(ranks))


def checked_run(rehearsal: Rehearsal) -> RunConfig:
    """The run, with its data and vocabulary. Raises UserError."""
    environ = {**os.environ, **rehearsal.environ(0), "DS_ACCELERATOR": expected_device(os.environ)}
    run = rehearsal.run(environ)
    from megatron.training.preflight import check

    if rehearsal.fake:  # memory of this host does not matter
        run = replace(run, logging=replace(run.logging, dry_run=True))
    run, _ = check(run)
    return replace(run, logging=replace(run.logging, dry_run=False))


def rehearse_ranks(rehearsal: Rehearsal, ranks: Sequence[int], program: Path) -> Iterator[dict[str, Any]]:
    """The figures of each of ``ranks``. Raises UserError if one fails."""

    def rehearse_one(number: int) -> dict[str, Any]:
        os.environ.update(rehearsal.environ(number))
        from megatron.launch.environment import prepare_environment

        prepare_environment(os.environ)  # before torch is imported
        from megatron.tools.rehearsal.rank import rehearse

        found = rehearse(rehearsal, number, program)
        if code := found.pop("exit_code"):
            sys.exit(code)
        return found

    with tempfile.TemporaryDirectory(prefix="rehearse.", ignore_cleanup_errors=True) as folder:
        for ended in run_in_forks(ranks, rehearse_one, lambda rank: Path(folder, str(rank))):
            yield _figures(ended)


_SHOWN = 40
"""Last lines of a program that fails without an error of the user."""


def _figures(ended: RankResult) -> dict[str, Any]:
    number, result, code, output = ended
    if result is not None:
        return result
    if code < 0:
        raise ResourceError(
            f"the rehearsal of rank {number} was ended by signal {-code}, perhaps for want of memory: rehearse a "
            "layout that takes less (tools/plan.py), or describe this one with --fake"
        )
    kinds = {kind.exit_code: kind for kind in UserError.__subclasses__()}
    errors = [line for line in output if "error: " in line] or [*output[-_SHOWN:], f"ended with exit code {code}"]
    raise kinds.get(code, LaunchError)([f"rank {number}: {line.partition('error: ')[2] or line}" for line in errors])


class Rehearsed(NamedTuple):
    """A layout and what its ranks took."""

    number: int
    """Its row in the plan, from 1 on."""
    candidate: Candidate
    expected: Expected | None
    """None if this machine has too little memory for a rank."""

    @property
    def peak(self) -> int:
        """Bytes of the rank that takes most."""
        ranks = self.expected.ranks if self.expected else ()
        return max((rank["memory_bytes"]["peak"] for rank in ranks), default=0)


def rehearse_layouts(candidates: Sequence[Candidate], program: Path, steps: int) -> Iterator[Rehearsed]:
    """Rehearse a rank of each kind of stage of each layout. Raises UserError if the program cannot be started."""
    for number, one in enumerate(candidates, 1):
        request = one.request
        rehearsal = Rehearsal(
            one.command, request.architecture, request.devices, request.machine.per_node, steps, fake=False
        )
        run = checked_run(rehearsal)
        try:
            ranks = list(rehearse_ranks(rehearsal, representative_ranks(run), program))
        except ResourceError:
            yield Rehearsed(number, one, None)
        else:
            yield Rehearsed(number, one, Expected(run, request.machine, ranks))


def ranked(layouts: Sequence[Rehearsed]) -> list[str]:
    """A table of ``layouts``, the fastest first."""
    fastest = sorted(layouts, key=lambda one: one.expected.seconds if one.expected else float("inf"))
    return aligned([("row", "TP", "PP", "DP", "ZeRO", "micro", "planned step", "expected step", "between",
                     "planned memory", "peak memory"), *map(_row, fastest)])  # fmt: skip


def _row(one: Rehearsed) -> tuple[str, ...]:
    layout, planned = layout_of(one.candidate), one.candidate
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "zero_stage", "micro_batch_size")
    sizes = [str(one.number), *(str(layout[name]) for name in names), duration(planned.timing.total)]
    memory = with_prefix(planned.memory.total, "B")
    if one.expected is None:
        return (*sizes, "out of memory here", "", memory, "")
    low, high = one.expected.between
    between = f"{duration(low)} to {duration(high)}"
    room = "" if one.peak <= planned.request.room else " (too much)"
    return (*sizes, duration(one.expected.seconds), between, memory, with_prefix(one.peak, "B") + room)
