"""Records and checks every start of a run; findings as text and as JSON."""

import multiprocessing
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.common.errors import LaunchError
from megatron.common.formats import with_prefix
from megatron.common.processes import die_with_parent
from megatron.config import RunConfig
from megatron.tools.command_line import progress_bar
from megatron.tools.communication.check import Counterexample, Issue, Trace, check, programs
from megatron.tools.communication.extract import Job, Prepare, extract, gather, import_lazy_modules
from megatron.tools.communication.request import ITERATIONS, Start, make_starts, representatives
from megatron.tools.process_pool import started_pool
from megatron.tools.verify.request import Layout, Request, without


@dataclass
class Finding:
    """Result of a start of the run: amount of communication by phase, and problems."""

    start: str
    phases: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of operations and bytes of all ranks, by phase."""
    classes: int = 0
    """Number of representatives that were run."""
    compared: list[int] = field(default_factory=list)
    """Sampled ranks, which were also run, to be compared with their representatives."""
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
    """Record and check the ``starts`` one after the other. ``folder`` is for temporary files."""
    run_representatives = representatives(run)
    others = sorted(set(range(run.parallel.world_size)) - set(run_representatives))
    sampled = sorted(random.Random(seed).sample(others, min(sample, len(others))))
    expected: dict[int, Trace] = {}
    loaded = {start.loads for start in starts}
    for number, start in enumerate(starts):
        chosen = run_representatives if start.world_size == run.parallel.world_size else [0] * start.world_size
        distinct = sorted(set(chosen))
        # Only in the first start: a sampled rank that resumes would read files of ranks that were not run.
        compared = sampled if start is starts[0] else []
        ranks = chosen[-1:] if start.nothing_counts and len(distinct) < len(chosen) else distinct
        job = Job(program, start.arguments, start.world_size, folder / str(number), prepare, start.nothing_counts)
        job = replace(job, signal_in=2 * ITERATIONS - 1 if start.ends_by_signal else None)
        if start.loads:
            for rank in ranks:
                shutil.copytree(folder / start.loads, job.folder_of(rank) / "checkpoint")
        running = extract(job, [*ranks, *compared], processes)
        bar = progress_bar(running, total=len(ranks) + len(compared), desc=start.name, unit=" ranks", shown=shown)
        traces = {trace.rank: trace for trace in bar}
        yield (
            _check_mixed(start, chosen, traces, expected)
            if expected and start.nothing_counts
            else _check(start, chosen, traces, compared)
        )
        expected = expected or traces
        if start.name in loaded:
            saved = [job.folder_of(rank) / "checkpoint" for rank in distinct]
            gather(saved, folder / start.name, run.parallel.model_parallel_size if len(chosen) > 1 else 1)
        shutil.rmtree(job.folder)


def verify_layouts(
    request: Request, layouts: Sequence[Layout], folder: Path, processes: int
) -> Iterator[tuple[Layout, list[Finding]]]:
    """Call ``verify`` for each of ``layouts``, in ``processes`` processes."""
    import_lazy_modules()
    chunks = [layouts[begin : begin + _CHUNK] for begin in range(0, len(layouts), _CHUNK)]
    context = multiprocessing.get_context("fork")
    with started_pool(processes, "--processes", die_with_parent, context) as pool:
        for results in pool.map(partial(_verify_in_sequence, request, folder), chunks):
            yield from results


_CHUNK = 8
"""Layouts that one process verifies, each loading the checkpoint of the previous one."""


def _verify_in_sequence(
    request: Request, parent: Path, layouts: Sequence[Layout]
) -> list[tuple[Layout, list[Finding]]]:
    """Call ``verify`` for ``layouts``, each of which loads the checkpoint of the previous one."""
    arguments = without(list(request.arguments), ["--eval-iters", "0"])
    folder = Path(tempfile.mkdtemp(dir=parent))
    previous, results = "", []
    for layout in layouts:
        flags = [*arguments, *layout.flags, "--batch-size", str(_micro_batch(layout, request))]
        run, (*own, _, loading) = make_starts(flags, layout.processes, request.environ, request.program)
        starts = [*own, replace(loading, name=f"from {previous}", loads=previous)] if previous else own
        findings: list[Finding] = []
        try:
            findings.extend(verify(run, starts, request.program, folder, processes=1, sample=1, shown=False))
        except LaunchError as error:  # the program of a rank failed
            shutil.rmtree(folder / str(len(findings)))
            findings.append(Finding(starts[len(findings)].name, problems=error.messages))
        results.append((layout, findings))
        if (saved := folder / own[0].name).exists():
            shutil.rmtree(folder / previous) if previous else None
            previous = layout.name
            saved.rename(folder / previous)
    shutil.rmtree(folder)
    return results


def _micro_batch(layout: Layout, request: Request) -> int:
    """The largest micro-batch size with two micro-batches per pipeline stage; more would only repeat the same calls."""
    replica_samples = request.run(request.first).train.global_batch_size // layout.data
    micro_batches = min(2 * max(layout.pipe, 1), replica_samples)
    return next(size for size in range(replica_samples // micro_batches, 0, -1) if replica_samples % size == 0)


def _check_mixed(start: Start, chosen: Sequence[int], traces: dict[int, Trace], expected: dict[int, Trace]) -> Finding:
    """Check that one rank whose tokens are all masked can run with other ranks whose tokens are not."""
    finding = Finding(start.name, classes=len(traces))
    for rank, trace in traces.items():
        if _difference(trace, expected[rank]) is None:
            continue
        mixed = [expected[representative] for representative in chosen]
        mixed[rank] = trace
        try:
            check(programs(mixed))
        except Counterexample as deadlock:
            finding.problems.append(f"if all tokens in the batches of rank {rank} are masked: {deadlock}")
    return finding


def _check(start: Start, chosen: Sequence[int], traces: dict[int, Trace], compared: list[int]) -> Finding:
    """Count the communication of all ranks, compare the sampled ranks, and check for races and deadlocks."""
    finding = Finding(start.name, classes=len(set(chosen)), compared=compared)
    for representative, count in Counter(chosen).items():
        for events in traces[representative].threads.values():
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
        check(programs([traces[representative] for representative in chosen]))
    except Counterexample as deadlock:
        finding.problems.append(str(deadlock))
    return finding


def _difference(trace: Trace, expected: Trace, *, in_size: bool = True) -> str | None:
    """The first difference between a rank and its representative; without ``in_size`` sizes may differ.

    The all-reduce of norm gradients over tensor-parallel ranks has different sizes in different ZeRO partitions.
    """
    for name in sorted(trace.threads.keys() | expected.threads.keys()):
        own, other = trace.threads.get(name, []), expected.threads.get(name, [])
        for event, reference in zip(own, other, strict=False):
            if event != reference and (in_size or _unsized(event) != _unsized(reference)):
                return f"rank {trace.rank} is not like rank {expected.rank}:\n  {_text(event)}\n  {_text(reference)}"
        if len(own) != len(other):
            return f"rank {trace.rank} is not like rank {expected.rank}: {len(own)} events, and {len(other)}"
    return None


def _unsized(event: Any) -> Any:
    if not isinstance(event, Issue):
        return event
    return event._replace(calls=tuple(call._replace(elements=0, size=0) for call in event.calls))


def _text(event: Any) -> str:
    return ", ".join(map(str, event.calls)) if isinstance(event, Issue) else f"waits at {event.location}"


def table(findings: Sequence[Finding]) -> str:
    """A table of the operations and bytes of all ranks, by start and phase."""
    lines = [f"{'start':14}{'phase':14}{'operations':>14}{'bytes':>12}{'ranks run':>12}"]
    for finding in findings:
        for phase, counts in finding.phases.items():
            row = f"{finding.start:14}{phase:14}{counts['operations']:>14,}{with_prefix(counts['bytes'], 'B'):>12}"
            lines.append(f"{row}{finding.classes + len(finding.compared):>12}")
    return "\n".join(lines)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings for ``--json``."""
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
