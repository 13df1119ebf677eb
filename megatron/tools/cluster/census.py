"""Which hosts of a hostfile can take part in a run: reachable, healthy by the doctor's checks, nothing left running."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.checkpoint.folder_lock import Owner
from megatron.common.errors import counted
from megatron.tools.cluster.doctor import Examination, examine_hosts
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.probe_hosts import CheckResult, HostReport, Unknown

_OF_HOST = ("name", "ssh", "python", "versions", "project", "arguments", "devices", "data", "folders")
"""The doctor's checks that a host must pass. The others are about all hosts, or do no harm to a run."""
_END_SECONDS = 5.0


class HostState(NamedTuple):
    """Whether a host can take part."""

    host: Host
    problem: str | None
    """Why it cannot; None if it can."""
    address: str = ""
    """The first that it lists of its own, where DeepSpeed has the ranks of other hosts find rank 0."""


def take_census(
    examination: Examination, variable: str, owner: Owner | None, silent: Mapping[str, str]
) -> tuple[list[HostState], bool]:
    """The state of each host of ``examination``, and whether ``owner``, of the lock of the checkpoints, has ended.

    One connection to each host ends what is left there and collects what the doctor checks, all at once.

    Args:
        examination: the hosts, and what is checked on them.
        variable: what all processes of the run have in their environment: those that are left are ended.
        owner: the process with the lock.
        silent: hosts that did not answer a moment ago, and why: they are not asked again.
    """
    place = owner and [owner.machine, owner.pid, owner.started]
    request = {"variable": variable, "seconds": _END_SECONDS, "owner": place}
    asked = [host for host in examination.hosts if host.name not in silent]
    states, reports = _examined(examination._replace(hosts=asked, leftovers=request))
    found = {state.host.name: state for state in states}
    left = {report.host.name: _leftovers(report) for report in reports}
    for name, (problem, _) in left.items():
        if found[name].problem is None and problem:
            found[name] = found[name]._replace(problem=problem)
    every = [found.get(host.name) or HostState(host, silent[host.name]) for host in examination.hosts]
    return every, any(owner_has_ended for _, owner_has_ended in left.values())


def look_at_hosts(examination: Examination) -> list[HostState]:
    """The state of each host of ``examination``. Nothing is ended there."""
    return _examined(examination)[0]


def _examined(examination: Examination) -> tuple[list[HostState], list[HostReport]]:
    if not examination.hosts:
        return [], []
    results, reports = examine_hosts(examination)
    states = [HostState(report.host, _first_problem(results[report.host.name]), _address(report)) for report in reports]
    return states, reports


def _address(report: HostReport) -> str:
    try:
        return report.fact("network")["address"]
    except Unknown:
        return ""


def _first_problem(checks: Mapping[str, Sequence[CheckResult]]) -> str | None:
    failed = ((name, result) for name in _OF_HOST for result in checks.get(name, ()) if not result.ok)
    return next((f"{name}: {result.found.removeprefix('ssh: ')}" for name, result in failed), None)


def _leftovers(report: HostReport) -> tuple[str | None, bool]:
    """Why an earlier start is not known to have ended on a host, and whether the owner of the lock has ended there."""
    try:
        answer = report.fact("leftovers")
    except Unknown as error:
        return f"ssh: {error}", False
    if answer["left"]:
        return f"{counted(answer['left'], 'process')} of the earlier start cannot be ended", answer["owner_has_ended"]
    return None, answer["owner_has_ended"]
