"""Which hosts of a hostfile can take part in a run: reachable, healthy by the doctor's checks, nothing left running."""

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megatron.checkpoint import folder_lock
from megatron.checkpoint.folder_lock import Owner
from megatron.config.errors import counted
from megatron.tools.cluster import leftovers
from megatron.tools.cluster.doctor import Examination, examine_hosts
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.probe_hosts import CheckResult
from megatron.tools.cluster.remote import ssh_command

_OF_HOST = ("name", "ssh", "python", "versions", "project", "arguments", "devices", "data", "folders")
"""The doctor's checks that a host must pass. The others are about all hosts, or do no harm to a run."""
_AT_ONCE = 64
_END_SECONDS, _ANSWER_SECONDS = 5.0, 20.0


class HostState(NamedTuple):
    """Whether a host can take part."""

    host: Host
    problem: str | None
    """Why it cannot; None if it can."""


class Leftovers(NamedTuple):
    """What an earlier start of a run left on a host, after its processes have been sent SIGKILL."""

    problem: str | None
    """Why it is not known, or not nothing."""
    owner_has_ended: bool
    """Whether the process that has the lock of the checkpoints ran here, and has ended."""


def take_census(examination: Examination, variable: str, owner: Owner | None) -> tuple[list[HostState], bool]:
    """The state of each host of ``examination``, and whether ``owner``, of the lock of the checkpoints, has ended.

    ``variable`` is what all processes of the run have in their environment: those that are left are ended.
    """
    with ThreadPoolExecutor(1) as pool:
        clearing = pool.submit(end_leftovers, examination.hosts, variable, owner, examination.ssh_port)
        looked = look_at_hosts(examination)
        left = clearing.result()
    states = [state._replace(problem=state.problem or left[state.host.name].problem) for state in looked]
    return states, any(one.owner_has_ended for one in left.values())


def look_at_hosts(examination: Examination) -> list[HostState]:
    """The state of each host of ``examination``. Nothing is ended there."""
    results, _ = examine_hosts(examination)
    return [HostState(host, _first_problem(results[host.name])) for host in examination.hosts]


def _first_problem(checks: Mapping[str, Sequence[CheckResult]]) -> str | None:
    failed = ((name, result) for name in _OF_HOST for result in checks.get(name, ()) if not result.ok)
    return next((f"{name}: {result.found.removeprefix('ssh: ')}" for name, result in failed), None)


def end_leftovers(hosts: Sequence[Host], variable: str, owner: Owner | None, port: int | None) -> dict[str, Leftovers]:
    """End every process with ``variable`` in its environment on all ``hosts``; the result by the name of the host."""
    place = owner and (owner.machine, owner.pid, owner.started)
    program = _program({"variable": variable, "seconds": _END_SECONDS, "owner": place})
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        found = pool.map(lambda host: _end_leftovers(host, program, port), hosts)
        return {host.name: one for host, one in zip(hosts, found, strict=True)}


def _end_leftovers(host: Host, program: str, port: int | None) -> Leftovers:
    try:
        command = ssh_command(host.name, [sys.executable, "-"], port)
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return Leftovers("ssh: no answer", owner_has_ended=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(leftovers.MARK)]
    if not lines:
        return Leftovers(f"ssh: {' '.join(done.stderr.split()[-20:]) or 'no answer'}", owner_has_ended=False)
    answer = json.loads(lines[0].removeprefix(leftovers.MARK))
    what = f"{counted(answer['left'], 'process')} of the earlier start cannot be ended" if answer["left"] else None
    return Leftovers(what, answer["owner_has_ended"])


def _sources() -> str:
    functions = (folder_lock.machine_id, folder_lock.start_time)
    own = [line for line in inspect.getsource(leftovers).splitlines() if not line.startswith("from megatron.")]
    sources = [*own, "from pathlib import Path", *(inspect.getsource(function) for function in functions)]
    return "\n".join(["from __future__ import annotations", *sources])


_SOURCES = _sources()
"""``leftovers`` with the functions that it uses, as of now: files may be updated while a supervisor runs."""


def _program(request: Mapping[str, Any]) -> str:
    return f"{_SOURCES}\nend_leftovers(json.loads({json.dumps(request)!r}))\n"
