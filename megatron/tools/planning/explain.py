"""``--explain`` and ``--dry-run``: describe a run without starting it, and without torch.

``--explain`` prints layout, rank groups, DeepSpeed config and all rules; ``--dry-run`` prints parameters, groups and
memory of single ranks.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from megatron.checkpoint.snapshot_files import describe_snapshots
from megatron.cli import ParsedRun
from megatron.cli.validation import RULES
from megatron.common.environment import ranks_on_host
from megatron.common.errors import ConfigError, UserError, counted
from megatron.common.formats import with_prefix, wrapped
from megatron.config import ParallelConfig, RunConfig
from megatron.model.spec import architecture_of
from megatron.parallel import axis_sizes, coordinates, groups, groups_along, ring_groups, ulysses_groups
from megatron.parallel.pipeline.schedule import Schedule, schedule_of
from megatron.parallel.pipeline.simulation import PassSeconds, in_flight, simulate
from megatron.tools.planning.memory import Memory, stage_memory
from megatron.tools.planning.schedule_costs import idle_share
from megatron.training.preflight import check
from megatron.training.summary import describe_config, describe_stages

_MOST_STAGES = 16
_SHOWN = 8
"""Maximum number of groups per axis, and of ranks per group, that are printed."""


def explain(reading: ParsedRun) -> None:
    """Print the explanation of a run. Starts nothing, and imports no torch.

    Raises:
        UserError: The error that the run itself would raise, after the explanation.
    """
    run, problems, warnings = reading
    print("\n".join(_rules(run, is_clean=not problems and not warnings)))
    for warning in warnings:
        print(f"warning: {warning}")
    if problems:
        raise ConfigError(problems)
    failure = None
    try:
        run, _ = check(run)
    except UserError as error:  # missing files on this host do not make the layout invalid
        failure = error
    print(wrapped("\n".join(_configuration(run))))
    if failure:
        raise failure


def dry_run(run: RunConfig) -> None:
    """Print parameters, groups and memory of the ranks in ``--rank``, by default one per pipeline stage.

    ``run`` must be checked, with known vocabulary size.
    """
    parallel = run.parallel
    print(wrapped("\n".join(_heading(run))))
    memories = stage_memory(run)
    for rank in run.logging.ranks or range(0, parallel.world_size, parallel.world_size // parallel.pipe_stages):
        print("\n".join(_rank(parallel, rank, memories)), flush=True)


def _rank(parallel: ParallelConfig, rank: int, memories: Sequence[Memory]) -> Iterator[str]:
    at, sizes = coordinates(parallel, rank), axis_sizes(parallel)
    memory = memories[at["pipe"]]
    trained = f", {memory.trained:,} of them trained" if memory.trained < memory.parameters else ""
    yield f"rank {rank}: stage {at['pipe']} of {sizes['pipe']}, {memory.parameters:,} parameters{trained}"
    for axis in ("tensor", "sequence", "data", "pipe"):
        if axis != "sequence" or sizes[axis] > 1:
            ranks = next(group for group in groups_along(parallel, axis) if rank in group)
            yield f"  {axis:8} {at[axis]} of {len(ranks)}: [{ranks_as_text(ranks)}]"
    parts = ", ".join(f"{name} {with_prefix(amount, 'B')}" for name, amount in memory.parts().items())
    yield f"  memory   {with_prefix(memory.total, 'B')}: {parts}"


def _heading(run: RunConfig) -> Iterator[str]:
    for name, text in describe_config(run).items():
        yield f"> {name:9} {text}"
    if run.parallel.uses_pipeline and run.model.padded_vocab_size and architecture_of(run.model).provider is None:
        yield describe_stages(run)


def _configuration(run: RunConfig) -> Iterator[str]:
    yield from _heading(run)
    if run.checkpoint.snapshot_interval and run.model.padded_vocab_size:
        yield f"> memory    {describe_snapshots(run, ranks_on_host(os.environ) or run.parallel.world_size)}"
    if run.parallel.pipe_stages > 1:
        yield from _schedule(run)
    for axis, ranks in {**groups(run.parallel), **_levels(run)}.items():
        yield f"> {axis:9} {_groups(ranks)}"
    yield f"> deepspeed {json.dumps(run.ds_config, indent=2)}"


def _schedule(run: RunConfig) -> Iterator[str]:
    """The order of passes of each stage, and the bubble if F, I and W take equally long."""
    schedule = schedule_of(run)
    kept = [ceil(sum(in_flight(schedule, stage)) / schedule.chunks) for stage in range(schedule.stages)]
    yield (
        f"> schedule  {schedule.name}, {counted(schedule.micro_batches, 'micro-batch')}: "
        f"{idle_share(schedule, PassSeconds()):.1%} of the time idle, "
        f"activations of at most {counted(max(kept), 'micro-batch')} kept on a stage"
    )
    yield from (f">   {line}" for line in schedule_text(schedule))


def schedule_text(schedule: Schedule, width: int = 116) -> Iterator[str]:
    """The beginning of a schedule as text, a line of ``width`` columns for each stage.

    F, I and W take one cell; a full backward pass takes two. ``F3b`` is the forward pass of micro-batch 3 through the
    second chunk of the stage.
    """
    shown, cells = schedule.shortened, dict[int, dict[int, str]]()
    for stage, action, begin, _ in simulate(shown, PassSeconds()):
        letter = "abcdefghijklmnopqrstuvwxyz"[action.chunk // schedule.stages % 26] if schedule.chunks > 1 else ""
        cells.setdefault(stage, {})[int(begin)] = f"{action.kind}{action.micro_batch + 1}{letter}"
    size = 1 + max(len(text) for row in cells.values() for text in row.values())
    label = len(f"stage {schedule.stages - 1}") + 1
    columns = min((width - label) // size, 1 + max(max(row) for row in cells.values()))
    for stage, row in sorted(cells.items())[:_MOST_STAGES]:
        line = "".join(f"{row.get(column, '.' if _is_idle(row, column) else ''):{size}}" for column in range(columns))
        yield f"{f'stage {stage}':{label}}{line.rstrip()}"


def _is_idle(row: Mapping[int, str], column: int) -> bool:
    """Whether an empty cell is idle, not the second cell of a backward pass."""
    return not row.get(column - 1, "").startswith("B")


def _levels(run: RunConfig) -> dict[str, list[list[int]]]:
    """The all-to-all and ring groups within the sequence groups, if there are both."""
    parallel = run.parallel
    if 1 in (parallel.ring_size, parallel.ulysses_size):
        return {}
    return {"a2a": ulysses_groups(parallel), "p2p": ring_groups(parallel)}


def _groups(ranks: Sequence[Sequence[int]]) -> str:
    """Groups of ranks as text, such as ``2 groups of 2: [0 1] [2 3]``."""
    shown = " ".join(f"[{ranks_as_text(group)}]" for group in ranks[:_SHOWN])
    return f"{counted(len(ranks), 'group')} of {len(ranks[0])}: {shown}{' ...' if len(ranks) > _SHOWN else ''}"


def ranks_as_text(group: Sequence[int]) -> str:
    """Ranks as text, such as ``0 1 2``; of many only the first and the last."""
    shown = [*map(str, group[:_SHOWN])]
    return " ".join([*shown, f"... {group[-1]}"] if len(group) > _SHOWN else shown)


def _rules(run: RunConfig, *, is_clean: bool) -> Iterator[str]:
    """Broken rules with message, reason and what DeepSpeed would do; warnings; with --verbose also fulfilled rules.

    ``is_clean``: there are no other problems or warnings, such as about single values.
    """
    messages = [(rule, rule.check(run)) for rule in RULES]
    broken = [(rule, message) for rule, message in messages if message is not None and not rule.only_warns]
    warned = [rule for rule, message in messages if message is not None and rule.only_warns]
    kept = [rule for rule, message in messages if message is None]
    for rule, message in broken:
        yield f"BROKEN  {rule.name}"
        yield f"          found: {message}"
        yield f"          because: {rule.why}"
        if rule.otherwise:
            yield f"          DeepSpeed otherwise: {rule.otherwise}"
    yield from (f"warning {rule.name}" for rule in warned)
    yield from (f"kept    {rule.name}" for rule in kept if run.logging.verbose)
    hint = "" if run.logging.verbose else "; --verbose lists those kept"
    counts = "all kept" if is_clean else f"{len(broken)} broken, {counted(len(warned), 'warning')}, {len(kept)} kept"
    yield f"{len(RULES)} rules, {counts}{hint}"
