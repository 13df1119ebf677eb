"""Restart a run on the hosts that are left, or on spare ones: what ``tools/launch.py --elastic`` does.

Each start begins with a census of all hosts. Lost hosts are replaced by spare ones; if there are not enough, the
planner chooses the layout for those that are left. The new ranks resume from the newest whole checkpoint.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.common.errors import LaunchError, counted
from megatron.launch.rank import print_error
from megatron.tools.cluster.census import HostState
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.supervise import CRASH_LOOP, FINAL


class TooFewHostsError(LaunchError):
    """Fewer hosts than ``--min-hosts`` can be reached; another supervisor may reach more."""


class Policy(NamedTuple):
    """The limits of restarts."""

    least_hosts: int
    exclude_after: int
    """Failures in a row without a new checkpoint, after which the host that was in all of them is left out."""
    max_restarts: int
    takes_snapshots: bool = False
    """Whether the hosts may have a newer state in memory than the newest checkpoint."""


class Start(NamedTuple):
    """What is started."""

    hosts: list[Host]
    arguments: list[str]
    """Of the training program."""
    layout: str
    """For the user."""


class Ended(NamedTuple):
    """How a start has ended."""

    code: int
    by_signal: bool
    failed_first: frozenset[str] = frozenset()
    """Hosts with ranks that ended by themselves, not because of others."""
    to_rejoin: bool = False
    """Whether it was ended after a checkpoint because hosts have come back."""


class Parts(NamedTuple):
    """What the loop calls."""

    census: Callable[[Mapping[str, str]], list[HostState]]
    """The state of all hosts but the excluded ones, after what is left of earlier starts has been ended."""
    choose: Callable[[Sequence[HostState]], Start | None]
    """What to start; None if no layout fits."""
    run: Callable[[Start], Ended]
    """Start it, and wait for its end."""
    progress: Callable[[], str | None]
    """The newest checkpoint; None while there is none."""


def pick_hosts(regular: Sequence[Host], states: Sequence[HostState]) -> list[Host]:
    """The hosts to use: the healthy ones of ``regular``, in order, and in the place of each lost one a spare host.

    A spare host with fewer slots than the lost one, and spare hosts beyond the number of lost ones, are not used,
    unless some lost host has no substitute: then all of the healthy ones are, up to the number of regular hosts.
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
    """Whether ``hosts`` have the ranks of ``regular``, host by host."""
    return [len(host.slots) for host in hosts] == [len(host.slots) for host in regular]


def failed_first(hosts: Sequence[Host], codes: Mapping[int, str]) -> frozenset[str]:
    """The hosts whose ranks failed by themselves, from the exit code that each rank of ``hosts`` has left.

    The code is empty for a rank that was killed, was lost with its host, or hung. With 6 a rank exits because of
    another. If that is true of all hosts or of none, no host is to blame: the result is empty.
    """
    found, first = set(), 0
    for host in hosts:
        ranks = range(first, first + len(host.slots))
        first = ranks.stop
        if any(codes.get(rank, "") not in ("0", str(LaunchError.exit_code)) for rank in ranks):
            found.add(host.name)
    return frozenset(found if len(found) < len(hosts) or len(hosts) == 1 else ())


def run_elastic(parts: Parts, policy: Policy) -> int:
    """Start the run, and again after each failure, on the hosts that are healthy then. Returns the exit code.

    Raises TooFewHostsError if fewer than the least number are healthy, LaunchError if no layout fits on them.
    """
    excluded: dict[str, str] = {}
    failures: list[frozenset[str]] = []
    started: set[str] = set()
    failed, code, reached = 0, 0, parts.progress()
    while True:
        states = parts.census(excluded)
        lost = {state.host.name for state in states if state.problem is not None}
        if started & lost:  # the loss of a host is no crash loop
            failures = failures[:-1]
        failures = [hosts for hosts in failures if not hosts & lost]
        if len(failures) == policy.exclude_after:
            suspects = frozenset.intersection(*failures)
            states = [state for state in states if state.host.name not in suspects]
            if _is_crash_loop(suspects, states, policy):
                return CRASH_LOOP
            excluded |= {host: f"it failed first in each of {policy.exclude_after} starts" for host in suspects}
            failures = []
        if failed > policy.max_restarts:
            return code
        if code:
            print_error(f"the run failed with exit code {code}: restart {failed} of {policy.max_restarts}")
        start = _next_start(parts, policy, states, excluded, reached)
        started = {host.name for host in start.hosts}
        code, by_signal, hosts, to_rejoin = parts.run(start)
        before, reached = reached, parts.progress()
        if by_signal or (code in FINAL and not to_rejoin):
            return code
        if to_rejoin:  # there is a new checkpoint
            code, failures = 0, []
            continue
        failures = [*failures, hosts] if reached == before else []
        failed += 1


def _is_crash_loop(suspects: frozenset[str], others: Sequence[HostState], policy: Policy) -> bool:
    """Whether to give up after failures in a row, of which each began on the hosts ``suspects``; prints which."""
    line = f"crash loop: {policy.exclude_after} failures in a row without a new checkpoint"
    if not suspects:
        print_error(f"{line}, and no host was in all of them; not restarted")
        return True
    names = " and ".join(sorted(suspects))
    if sum(state.problem is None for state in others) < policy.least_hosts:
        print_error(f"{line}, {names} in all of them, and too few without; not restarted")
        return True
    print_error(f"{line}, {names} in all of them: left out from here on (--exclude-after)")
    return False


def _next_start(
    parts: Parts, policy: Policy, states: Sequence[HostState], excluded: Mapping[str, str], reached: str | None
) -> Start:
    problems = {**excluded, **{state.host.name: state.problem for state in states if state.problem is not None}}
    lost = "; ".join(f"without {host} ({problem})" for host, problem in problems.items())
    healthy = sum(state.problem is None for state in states)
    unchanged = "nothing was started, and the checkpoints are unchanged"
    if healthy < policy.least_hosts:
        raise TooFewHostsError(
            f"{counted(healthy, 'host')} can take part, fewer than --min-hosts {policy.least_hosts}: {lost}; "
            f"{unchanged}"
        )
    start = parts.choose(states)
    if start is None:
        raise LaunchError(f"no layout fits ({lost}): see tools/plan.py with the same arguments; {unchanged}")
    ranks = sum(len(host.slots) for host in start.hosts)
    names = " ".join(host.name for host in start.hosts)
    after = f"resuming from {reached}" if reached else "from the beginning"
    after += ", unless the hosts have a newer snapshot" if policy.takes_snapshots else ""
    announce(f"{counted(ranks, 'rank')} on {names}{f', {lost}' if lost else ''}: {start.layout}; {after}")
    return start


def announce(line: str) -> None:
    """Print what the supervisor does, on one line."""
    print(f"launch.py: elastic: {' '.join(line.split())}", file=sys.stderr, flush=True)
