"""Probes many hosts concurrently: sends the probe over ssh, and collects the reports."""

import inspect
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint import folder_lock
from megatron.common import reading
from megatron.common.processes import machine_id
from megatron.config import RunConfig
from megatron.data import fingerprint
from megatron.launch.host_limits import connect_to_itself
from megatron.tools.cluster import probe
from megatron.tools.cluster.hostfile import Host, is_this_host
from megatron.tools.cluster.remote import ssh_command

PROJECT = Path(__file__).resolve().parents[3]
_AT_ONCE = 256
"""Maximum number of concurrent connections."""
# The probe runs with the interpreter that the launcher will start, if that exists.
_PYTHON = 'if [ -x "$0" ]; then exec "$0" -; else exec python3 -; fi'


class Unknown(Exception):
    """A fact that a host could not collect."""


class HostReport(NamedTuple):
    """Report of the probe on a host."""

    host: Host
    failure: str | None = None
    """Why there are no facts: usually ssh's last lines."""
    facts: Mapping[str, Any] = {}
    """{"value": ...} or {"error": ...} by the names of ``probe.FACTS``."""
    without_ssh: str | None = None
    """Why the facts were collected without ssh, on this machine; None if ssh was used."""

    def fact(self, name: str) -> Any:
        """The fact ``name``. Raises Unknown if there is none."""
        fact = self.facts.get(name, {"error": self.failure or "no answer"})
        if "error" in fact:
            raise Unknown(fact["error"])
        return fact["value"]


class CheckResult(NamedTuple):
    """Result of a check: one line of the table."""

    ok: bool
    found: str
    fix: str | None = None
    """A command that fixes the problem, or shows what to fix."""


class Examination(NamedTuple):
    """Arguments of a health check."""

    hosts: Sequence[Host]
    run: RunConfig | None
    """The run to start; None to check the hosts without a run."""
    config_file: str | None
    """DeepSpeed's JSON file, if it is given."""
    device: str
    environ: Mapping[str, str]
    uses_ssh: bool
    """False if there is no hostfile, so that the only host is this machine."""
    master_address: str
    """Empty for the address of the first host."""
    master_port: int
    ssh_port: int | None
    seconds: float
    """Time limit for the report of each host, and for the rendezvous of the all-reduce."""
    leftovers: Mapping[str, Any] | None = None
    """Arguments of ``probe.end_leftovers``, which runs on each host first; None to skip it."""


class HostContext(NamedTuple):
    """Argument of a check: the report of a host, and the reports that it is compared with."""

    report: HostReport
    local: HostReport
    """Report of the host that starts the run, whose Python, project and data are the reference."""
    all_reports: Sequence[HostReport]
    """All hosts of the run, including this one, in the order of the hostfile."""
    examination: Examination
    request: Mapping[str, Any]
    """The arguments of ``probe.answer``."""

    def fact(self, name: str) -> Any:
        """The fact ``name`` of this host. Raises Unknown if the host could not collect it."""
        return self.report.fact(name)

    def fix(self, *command: str) -> str:
        """The command line for the user that runs ``command`` on this host."""
        if self.report.without_ssh is not None:
            return shlex.join(command)
        port = self.examination.ssh_port
        flags = ["-p", str(port)] if port else []
        return " ".join(["ssh", *flags, self.report.host.name, shlex.quote(shlex.join(command))])

    def copy_command(self, *paths: str, folder: str, flags: Sequence[str] = ()) -> str:
        """The command line for the user that copies ``paths`` of the local host into ``folder`` on this host."""
        port = self.examination.ssh_port
        shell = ["-e", f"ssh -p {port}"] if port else []
        name = self.report.host.name
        target = f"[{name}]:{folder}/" if ":" in name else f"{name}:{folder}/"
        return shlex.join(["rsync", "-a", *flags, *shell, *paths, target])


def probe_hosts(
    hosts: Sequence[Host], requests: Sequence[Mapping[str, Any]], port: int | None, seconds: float
) -> list[HostReport]:
    """Probe hosts, each with its request (see ``probe.answer``) and a time limit of ``seconds``.

    If ssh to this machine fails, it is probed without ssh.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host, request: _probe_host(host, request, port, seconds), hosts, requests))


def probe_local_host(request: Mapping[str, Any], seconds: float) -> HostReport:
    """Probe the local host, without ssh."""
    return _run_probe(Host("this host", ()), [sys.executable, "-"], request, seconds)


def _probe_host(host: Host, request: Mapping[str, Any], port: int | None, seconds: float) -> HostReport:
    command = ["sh", "-c", _PYTHON, sys.executable]
    report = _run_probe(host, ssh_command(host.name, command, port), request, seconds)
    if not report.facts and is_this_host(host.name):
        report = probe_local_host(request, seconds)._replace(host=host, without_ssh=report.failure)
    return report


def _run_probe(host: Host, command: Sequence[str], request: Mapping[str, Any], seconds: float) -> HostReport:
    program = f"{_SOURCES}\nanswer({dict(request)!r})\n"
    # A file, not a pipe: ssh may leave a process that keeps a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            done = subprocess.run(
                command, input=program, stdout=subprocess.PIPE, stderr=errors, timeout=seconds, text=True,
                errors="replace",
            )  # fmt: skip
        except OSError as error:
            return HostReport(host, failure=f"{command[0]}: {error.strerror}")
        except subprocess.TimeoutExpired:
            return HostReport(host, failure=f"no report within {seconds:g} s")
        for line in done.stdout.splitlines():
            if line.startswith(probe.MARK):
                return HostReport(host, facts=json.loads(line.removeprefix(probe.MARK)))
        errors.seek(0)
        printed = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return HostReport(host, failure=" ".join(printed[-2:]) or "no output")


def _sources() -> str:
    parts = (reading, fingerprint, machine_id, folder_lock.start_time, connect_to_itself, probe)
    lines = "\n".join(inspect.getsource(part) for part in parts).split("\n")
    # numpy is for the cache of hashes, which the probe does not use.
    own = "\n".join(line for line in lines if not line.startswith(("from megatron.", "import numpy")))
    return f"from __future__ import annotations\n{own}"


_SOURCES = _sources()
"""Source of the probe and of the functions that it uses, read now: files may be updated while an elastic agent runs."""
