"""The elastic agent's decisions (``tools/launch.py --elastic``): when and on which hosts a run starts and restarts.

Each start begins with a health check of all hosts. Spare hosts replace lost ones; if there are too few, the planner
chooses a layout for the remaining hosts. The ranks resume from the newest complete checkpoint.
"""

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.common.errors import LaunchError, counted
from megatron.common.reading import LARGEST_SETTINGS, read_json, type_problem
from megatron.launch.rank import print_error
from megatron.tools.cluster.doctor import HostState
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.supervise import CRASH_LOOP, FINAL

if TYPE_CHECKING:
    from megatron.tools.cluster.elastic_run import ElasticRun


class TooFewHostsError(LaunchError):
    """Fewer hosts than ``--min-hosts`` can be reached; another agent may reach more."""


class Start(NamedTuple):
    """A start of the run: hosts and arguments."""

    hosts: list[Host]
    arguments: list[str]
    """Arguments of the training program."""
    layout: str
    """Description of the layout for the user."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the hosts."""
        return frozenset(host.name for host in self.hosts)

    @property
    def host_names(self) -> list[str]:
        """The name of each rank's host."""
        return [host.name for host in self.hosts for _ in host.slots]

    def ranks_on(self, names: Collection[str]) -> list[int]:
        """The ranks on the hosts with these names."""
        return [rank for rank, name in enumerate(self.host_names) if name in names]


class StartResult(NamedTuple):
    """How a start of the run has ended."""

    code: int
    by_signal: bool
    failed_first: frozenset[str] = frozenset()
    """Hosts with ranks that failed by themselves, not as a consequence of other ranks."""
    to_rejoin: bool = False
    """Whether the agent ended it after a checkpoint because lost hosts have come back."""


def pick_hosts(regular: Sequence[Host], states: Sequence[HostState]) -> list[Host]:
    """The hosts to use: the healthy ``regular`` hosts in order, with each lost host replaced by a spare host.

    A spare host only replaces a host with as many slots or fewer. If a lost host has no substitute, remaining healthy
    spare hosts are appended, up to the number of regular hosts.
    """
    healthy = {state.host.name: state.host for state in states if state.problem is None}
    spares = [host for host in healthy.values() if host.spare]
    chosen: list[Host] = []
    for host in regular:
        if host.name in healthy:
            chosen.append(host)
        elif substitute := next((spare for spare in spares if len(spare.slots) >= len(host.slots)), None):
            spares.remove(substitute)
            chosen.append(substitute._replace(slots=substitute.slots[: len(host.slots)]))
    return [*chosen, *spares[: len(regular) - len(chosen)]]


def is_complete(regular: Sequence[Host], hosts: Sequence[Host]) -> bool:
    """Whether ``hosts`` have the same numbers of ranks as ``regular``, host by host."""
    return [len(host.slots) for host in hosts] == [len(host.slots) for host in regular]


def failed_first(start: Start, codes: Mapping[int, str]) -> frozenset[str]:
    """The hosts whose ranks failed by themselves, from the exit codes that the ranks of ``start`` have written.

    The code is empty for a rank that was killed, was lost with its host, or hung. A rank that exits because of another
    rank has code 6. If ranks failed by themselves on all hosts, no host is to blame: the result is empty.
    """
    innocent = ("0", str(LaunchError.exit_code))
    failed = {
        host.name
        for host in start.hosts
        if any(codes.get(rank, "") not in innocent for rank in start.ranks_on({host.name}))
    }
    return frozenset(failed if len(failed) < len(start.hosts) or len(start.hosts) == 1 else ())


def with_ended(codes: Mapping[int, str], start: Start, gone: set[str]) -> dict[int, str]:
    """``codes`` with 6 for ranks that were still running when the agent ended the start because of the hosts ``gone``.

    If the ranks on ``gone`` ended as a consequence of other ranks, a running rank hung: the codes are not changed.
    """
    others = str(LaunchError.exit_code)
    if all(codes.get(rank, "") == others for rank in start.ranks_on(gone)):
        return dict(codes)
    ran = start.ranks_on(start.names - gone)
    return {**codes, **{rank: codes.get(rank) or others for rank in ran}}


def slow_hosts(file: Path, start: Start) -> set[str]:
    """The hosts, by their names in the hostfile, of the ranks that ``--straggler-report`` has written to ``file``."""
    try:
        report = read_json(file, largest=LARGEST_SETTINGS)
    except (OSError, ValueError):
        return set()
    ranks = report.get("ranks", []) if isinstance(report, dict) else []
    if type_problem(list[int], ranks):
        return set()
    return {name for rank, name in enumerate(start.host_names) if rank in ranks}


def without_slow(states: Sequence[HostState], slow: Collection[str], least: int) -> list[HostState]:
    """``states`` with slow hosts marked as not usable, as long as ``least`` hosts remain."""
    marked = list(states)
    for number, state in enumerate(states):
        if state.problem is None and state.host.name in slow and healthy_count(marked) > least:
            marked[number] = state._replace(problem="slower than others: --exclude-stragglers")
    return marked


def healthy_count(states: Sequence[HostState]) -> int:
    """Number of hosts that can take part."""
    return sum(state.problem is None for state in states)


def run_elastic(run: "ElasticRun") -> int:
    """Start the run, and restart it after each failure, on the hosts that are then healthy. Returns the exit code.

    Raises TooFewHostsError if fewer than ``--min-hosts`` are healthy, LaunchError if no layout fits on them.
    """
    launch = run.launch
    excluded: dict[str, str] = {}
    failures: list[frozenset[str]] = []
    started: frozenset[str] = frozenset()
    failed, code, reached = 0, 0, run.progress()
    while True:
        states = run.check_hosts(excluded)
        lost = {state.host.name for state in states if state.problem is not None}
        if started & lost:  # the loss of a host is no crash loop
            failures = failures[:-1]
        failures = [hosts for hosts in failures if not hosts & lost]
        if len(failures) == launch.exclude_after:
            suspects = frozenset.intersection(*failures)
            states = [state for state in states if state.host.name not in suspects]
            if _is_crash_loop(suspects, states, launch):
                return CRASH_LOOP
            excluded |= {host: f"it failed first in each of {launch.exclude_after} starts" for host in suspects}
            failures = []
        if failed > launch.max_restarts:
            return code
        if code:
            print_error(f"the run failed with exit code {code}: restart {failed} of {launch.max_restarts}")
        start = _next_start(run, states, excluded, reached)
        started = start.names
        code, by_signal, hosts, to_rejoin = run.start(start)
        before, reached = reached, run.progress()
        if by_signal or (code in FINAL and not to_rejoin):
            return code
        if to_rejoin:  # it ended after a new checkpoint
            code, failures = 0, []
            continue
        failures = [*failures, hosts] if reached == before else []
        failed += 1


def _is_crash_loop(suspects: frozenset[str], others: Sequence[HostState], launch: Namespace) -> bool:
    """Whether to give up after consecutive failures that all began on the hosts ``suspects``; prints the decision."""
    line = f"crash loop: {launch.exclude_after} failures in a row without a new checkpoint"
    if not suspects:
        print_error(f"{line}, and no host was in all of them; not restarted")
        return True
    names = " and ".join(sorted(suspects))
    if healthy_count(others) < launch.min_hosts:
        print_error(f"{line}, {names} in all of them, and too few without; not restarted")
        return True
    print_error(f"{line}, {names} in all of them: left out from here on (--exclude-after)")
    return False


def _next_start(
    run: "ElasticRun", states: Sequence[HostState], excluded: Mapping[str, str], reached: str | None
) -> Start:
    problems = {**excluded, **{state.host.name: state.problem for state in states if state.problem is not None}}
    lost = "; ".join(f"without {host} ({problem})" for host, problem in problems.items())
    healthy = healthy_count(states)
    unchanged = "nothing was started, and the checkpoints are unchanged"
    least = run.launch.min_hosts
    if healthy < least:
        raise TooFewHostsError(
            f"{counted(healthy, 'host')} can take part, fewer than --min-hosts {least}: {lost}; {unchanged}"
        )
    start = run.choose(states)
    if start is None:
        raise LaunchError(f"no layout fits ({lost}): see tools/plan.py with the same arguments; {unchanged}")
    names = " ".join(host.name for host in start.hosts)
    after = f"resuming from {reached}" if reached else "from the beginning"
    after += ", unless the hosts have a newer snapshot" if run.takes_snapshots else ""
    announce(
        f"{counted(len(start.host_names), 'rank')} on {names}{f', {lost}' if lost else ''}: {start.layout}; {after}"
    )
    return start


def announce(line: str) -> None:
    """Print an action of the agent on one line."""
    print(f"launch.py: elastic: {' '.join(line.split())}", file=sys.stderr, flush=True)
