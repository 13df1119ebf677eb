"""Extract every start of a run, and check it: what is found, as text and as JSON."""

import multiprocessing
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.common.errors import LaunchError
from megatron.common.processes import die_with_parent
from megatron.common.units import with_prefix
from megatron.config import RunConfig
from megatron.tools.command_line import progress_bar
from megatron.tools.communication.check import Counterexample, Issue, Trace, check, programs
from megatron.tools.communication.extract import Job, Prepare, extract, gather, import_late
from megatron.tools.communication.request import ITERATIONS, Start, make_starts, representatives
from megatron.tools.verify.request import Layout, Request, without


@dataclass
class Finding:
    """A start of the run, what its ranks communicate in each phase, and what is wrong with it."""

    start: str
    phases: dict[str, Counter[str]] = field(default_factory=dict)
    """Operations, and bytes, of all ranks by phase."""
    classes: int = 0
    """Ranks that have been run, others than the sample."""
    compared: list[int] = field(default_factory=list)
    """Ranks of the sample, each run in full, too."""
    problems: list[str] = field(default_factory=list)


def verify(
    run: RunConfig,
    starts: Sequence[Start],
    program: Path,
    folder: Path,
    *,
    processes: int,
    sample: int = 0,
    seed: int = 1,
    prepare: Prepare | None = None,
    shown: bool = True,
) -> Iterator[Finding]:
    """Extract and check the ``starts`` one after the other. Files are kept in ``folder`` meanwhile."""
    of_run = representatives(run)
    others = sorted(set(range(run.parallel.world_size)) - set(of_run))
    sampled = sorted(random.Random(seed).sample(others, min(sample, len(others))))
    expected: dict[int, Trace] = {}
    loaded = {start.loads for start in starts}
    for number, start in enumerate(starts):
        chosen = of_run if start.world_size == run.parallel.world_size else [0] * start.world_size
        stands_for = sorted(set(chosen))
        # A rank of the sample that resumed would read what ranks that are not run have saved.
        compared = sampled if start is starts[0] else []
        ranks = chosen[-1:] if start.nothing_counts and len(stands_for) < len(chosen) else stands_for
        job = Job(program, start.words, start.world_size, folder / str(number), prepare, start.nothing_counts)
        job = replace(job, signal_in=2 * ITERATIONS - 1 if start.ends_by_signal else None)
        if start.loads:
            for rank in ranks:
                shutil.copytree(folder / start.loads, job.folder_of(rank) / "checkpoint")
        running = extract(job, [*ranks, *compared], processes)
        bar = progress_bar(running, total=len(ranks) + len(compared), desc=start.name, unit=" ranks", shown=shown)
        traces = {trace.rank: trace for trace in bar}
        yield (
            _compared(start, chosen, traces, expected)
            if expected and start.nothing_counts
            else _checked(start, chosen, traces, compared)
        )
        expected = expected or traces
        if start.name in loaded:
            saved = [job.folder_of(rank) / "checkpoint" for rank in stands_for]
            gather(saved, folder / start.name, run.parallel.model_parallel_size if len(chosen) > 1 else 1)
        shutil.rmtree(job.folder)


def verify_layouts(
    request: Request, layouts: Sequence[Layout], folder: Path, processes: int
) -> Iterator[tuple[Layout, list[Finding]]]:
    """``verify`` of each of ``layouts``, in pieces, as many at a time as there may be ``processes``."""
    import_late()
    pieces = [layouts[begin : begin + _IN_TURN] for begin in range(0, len(layouts), _IN_TURN)]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, die_with_parent) as pool:
        for found in pool.map(partial(_verify_in_turn, request, folder), pieces):
            yield from found


_IN_TURN = 8
"""Layouts of which each loads the checkpoint of the one before it."""


def _verify_in_turn(request: Request, parent: Path, layouts: Sequence[Layout]) -> list[tuple[Layout, list[Finding]]]:
    """``verify`` of ``layouts``, which load each other's checkpoints in place of one rank's."""
    words = without(list(request.arguments), ["--eval-iters", "0"])
    folder = Path(tempfile.mkdtemp(dir=parent))
    before, found = "", []
    for layout in layouts:
        flags = [*words, *layout.flags, "--batch-size", str(_micro_batch(layout, request))]
        run, (*own, _, loading) = make_starts(flags, layout.processes, request.environ, request.program)
        starts = [*own, replace(loading, name=f"from {before}", loads=before)] if before else own
        findings: list[Finding] = []
        try:
            findings.extend(verify(run, starts, request.program, folder, processes=1, sample=1, shown=False))
        except LaunchError as error:  # a rank does not run
            shutil.rmtree(folder / str(len(findings)))
            findings.append(Finding(starts[len(findings)].name, problems=error.messages))
        found.append((layout, findings))
        if (saved := folder / own[0].name).exists():
            shutil.rmtree(folder / before) if before else None
            before = layout.name
            saved.rename(folder / before)
    shutil.rmtree(folder)
    return found


def _micro_batch(layout: Layout, request: Request) -> int:
    """The largest size that leaves two micro-batches for each pipeline stage: more repeat what these communicate."""
    of_replica = request.run(request.first).train.global_batch_size // layout.data
    wanted = min(2 * max(layout.pipe, 1), of_replica)
    return next(size for size in range(of_replica // wanted, 0, -1) if of_replica % size == 0)


def _compared(start: Start, chosen: Sequence[int], traces: dict[int, Trace], expected: dict[int, Trace]) -> Finding:
    """Whether a rank with batches of which nothing counts can run beside ranks with others."""
    finding = Finding(start.name, classes=len(traces))
    for rank, trace in traces.items():
        if _difference(trace, expected[rank]) is None:
            continue
        mixed = [expected[one] for one in chosen]
        mixed[rank] = trace
        try:
            check(programs(mixed))
        except Counterexample as found:
            finding.problems.append(f"if nothing in the batches of rank {rank} counts: {found}")
    return finding


def _checked(start: Start, chosen: Sequence[int], traces: dict[int, Trace], compared: list[int]) -> Finding:
    finding = Finding(start.name, classes=len(set(chosen)), compared=compared)
    for one, count in Counter(chosen).items():
        for events in traces[one].threads.values():
            for call in (call for event in events if isinstance(event, Issue) for call in event.calls):
                phase = finding.phases.setdefault(call.phase, Counter())
                phase["operations"] += count
                phase["bytes"] += count * call.size
    for rank in compared:
        if difference := _difference(traces[rank], traces[chosen[rank]], in_size=False):
            finding.problems.append(difference)
    for trace in traces.values():
        finding.problems += [f"rank {trace.rank}: {fault}" for fault in trace.faults]
    try:
        check(programs([traces[one] for one in chosen]))
    except Counterexample as found:
        finding.problems.append(str(found))
    return finding


def _difference(trace: Trace, expected: Trace, *, in_size: bool = True) -> str | None:
    """Where a rank departs from the one that stands for it; without ``in_size`` sizes may differ.

    The sum of norms' gradients over tensor-parallel ranks has other sizes in other parts of ZeRO's.
    """
    for name in sorted(trace.threads.keys() | expected.threads.keys()):
        own, other = trace.threads.get(name, []), expected.threads.get(name, [])
        for one, two in zip(own, other, strict=False):
            if one != two and (in_size or _unsized(one) != _unsized(two)):
                return f"rank {trace.rank} is not like rank {expected.rank}:\n  {_of(one)}\n  {_of(two)}"
        if len(own) != len(other):
            return f"rank {trace.rank} is not like rank {expected.rank}: {len(own)} events, and {len(other)}"
    return None


def _unsized(event: Any) -> Any:
    if not isinstance(event, Issue):
        return event
    return event._replace(calls=tuple(call._replace(elements=0, size=0) for call in event.calls))


def _of(event: Any) -> str:
    return ", ".join(map(str, event.calls)) if isinstance(event, Issue) else f"waits at {event.place}"


def table(findings: Sequence[Finding]) -> str:
    """Operations and bytes of all ranks, by start and phase."""
    lines = [f"{'start':14}{'phase':14}{'operations':>14}{'bytes':>12}{'ranks run':>12}"]
    for finding in findings:
        for phase, counts in finding.phases.items():
            row = f"{finding.start:14}{phase:14}{counts['operations']:>14,}{with_prefix(counts['bytes'], 'B'):>12}"
            lines.append(f"{row}{finding.classes + len(finding.compared):>12}")
    return "\n".join(lines)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "no_rank_can_hang": not any(finding.problems for finding in findings),
        "starts": [
            {
                "name": finding.start,
                "phases": {phase: dict(counts) for phase, counts in finding.phases.items()},
                "classes": finding.classes,
                "ranks_compared": finding.compared,
                "problems": finding.problems,
            }
            for finding in findings
        ],
    }
