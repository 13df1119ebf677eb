"""Formats the results of a rehearsal as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from megatron.common.formats import duration, with_prefix
from megatron.config import RunConfig
from megatron.model.spec import architecture_of
from megatron.tools.planning.memory import Memory, stage_memory
from megatron.tools.rehearsal.estimate import Expected, stage_of
from megatron.tools.reporting.callbacks import smallest_change

_STATES = ("weights", "gradients", "optimizer")
_PHASES = ("data", "forward", "backward", "reduction", "optimizer", "host")
_LEAST_SHOWN = 0.001
"""Minimum share of the step of an uncertainty that is shown."""


def planned_memory(run: RunConfig, stage: int) -> Memory | None:
    """The planned memory of a rank of ``stage``; None for a user-provided model."""
    return None if architecture_of(run.model).provider is not None else stage_memory(run)[stage]


def describe_rank(run: RunConfig, rank: Mapping[str, Any], room: float) -> Iterator[str]:
    """Lines about one rehearsed rank, on devices with ``room`` bytes of memory."""
    stage = stage_of(run, rank["rank"])
    yield f"rank {rank['rank']}: stage {stage} of {run.parallel.pipe_stages}"
    if "seconds" in rank:
        measured = rank["phases"]
        phases = ", ".join(f"{name} {duration(measured[name]['wall'])}" for name in _PHASES if name in measured)
        walls = [iteration["wall"] for iteration in rank["rounds"]]
        spread = f"{duration(min(walls))} to {duration(max(walls))} in {len(walls)} iterations"
        seconds = rank["seconds"]
        yield f"  step      {duration(seconds['wall'])} ({spread}), without communication; {phases}"
        yield f"  host      {duration(rank['launched_seconds'])} to launch it, {duration(seconds['cpu'])} of CPU time"
    yield (
        f"  launches  {rank['kernels']:,} kernels"
        f", of which {rank['copies']:,} copy {with_prefix(rank['copied_bytes'], 'B')}"
        f"; {rank['collectives']:,} collectives and transfers of {with_prefix(rank['sent_bytes'], 'B')}"
        f"; the host waits {rank['host_waits']:,} times"
    )
    yield from _memory(run, rank, stage, room)


def _memory(run: RunConfig, rank: Mapping[str, Any], stage: int, room: float) -> Iterator[str]:
    measured, planned = rank["memory_bytes"], planned_memory(run, stage)
    parts = ", ".join(f"{name} {with_prefix(amount, 'B')}" for name, amount in measured.items() if name != "peak")
    yield f"  memory    {with_prefix(measured['peak'], 'B')} at the peak: {parts}"
    if planned is not None:
        states = {name: planned.parts()[name] for name in _STATES}
        shown = states | {"activations": planned.total - sum(states.values())}
        text = ", ".join(f"{name} {with_prefix(amount, 'B')}" for name, amount in shown.items())
        yield f"  planned   {with_prefix(planned.total, 'B')}: {text}"
    if measured["peak"] > room:
        advice = "" if planned is None else f"; {smallest_change(run, stage, room)}"
        yield f"  does not fit into {with_prefix(room, 'B')}{advice}"


def describe_expected(expected: Expected) -> Iterator[str]:
    """Lines about the expected step of the run."""
    low, high = expected.between
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in expected.parts.items())
    yield f"expected step {duration(expected.seconds)}, between {duration(low)} and {duration(high)}: {parts}"
    for part in expected.uncertainties:
        if max(part.low, part.high) > _LEAST_SHOWN * expected.seconds:
            yield f"  {part.name:13} -{duration(part.low)} to +{duration(part.high)}: {part.why}"
    length = f"{expected.days:.3g} days" if expected.days >= 1 else str(timedelta(seconds=round(86400 * expected.days)))
    yield (
        f"{expected.tokens_per_second:,.0f} tokens/s, MFU {expected.mfu:.1%}, {length} for "
        f"{expected.run.train.train_iters:,} iterations"
    )


def as_json(run: RunConfig, ranks: Sequence[Mapping[str, Any]], expected: Expected | None) -> dict[str, Any]:
    """The results for ``--json``: bytes, seconds and counts."""
    report: dict[str, Any] = {"world_size": run.parallel.world_size, "ranks": []}
    for rank in ranks:
        planned = planned_memory(run, stage_of(run, rank["rank"]))
        bytes_planned = None if planned is None else {**planned.parts(), "total": planned.total}
        report["ranks"].append({"stage": stage_of(run, rank["rank"]), **rank, "planned_bytes": bytes_planned})
    if expected is not None:
        report["expected"] = {
            "seconds": expected.seconds,
            "between": expected.between,
            "parts": expected.parts,
            "uncertainties": [part._asdict() for part in expected.uncertainties],
            "tokens_per_second": expected.tokens_per_second,
            "mfu": expected.mfu,
            "days": expected.days,
        }
    return report
