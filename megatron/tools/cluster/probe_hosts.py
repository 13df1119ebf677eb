"""Probe many hosts at once: send each the probe over ssh, and gather the reports."""

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
from megatron.tools.cluster import probe
from megatron.tools.cluster.hostfile import Host, is_this_host
from megatron.tools.cluster.remote import ssh_command

PROJECT = Path(__file__).resolve().parents[3]
_AT_ONCE = 256
# The launcher will start the python of this path, so that one runs the probe, if it exists.
_PYTHON = 'if [ -x "$0" ]; then exec "$0" -; else exec python3 -; fi'


class Unknown(Exception):
    """A host could not collect a fact."""


class HostReport(NamedTuple):
    """What a host reported."""

    host: Host
    failure: str | None = None
    """Why there are no facts: mostly ssh's last lines."""
    facts: Mapping[str, Any] = {}
    """By the names of ``probe.FACTS``: {"value": ...} or {"error": ...}."""
    without_ssh: str | None = None
    """Why the facts were collected without ssh, on this machine; None if it was used."""

    def fact(self, name: str) -> Any:
        """The fact ``name``. Raises Unknown if there is none."""
        fact = self.facts.get(name, {"error": self.failure or "no answer"})
        if "error" in fact:
            raise Unknown(fact["error"])
        return fact["value"]


class CheckResult(NamedTuple):
    """One line of the table."""

    ok: bool
    found: str
    fix: str | None = None
    """A command that fixes it, or shows what to fix."""


class Examination(NamedTuple):
    """What to check."""

    hosts: Sequence[Host]
    run: RunConfig | None
    """What is to be trained; None to check the hosts without a run."""
    config_file: str | None
    """DeepSpeed's JSON, if there is one."""
    device: str
    environ: Mapping[str, str]
    uses_ssh: bool
    """False: the one host is this machine, which no hostfile names."""
    master_address: str
    """Empty: the address of the first host."""
    master_port: int
    ssh_port: int | None
    seconds: float
    """Time limit for the report of each host, and for the rendezvous of the all-reduce."""
    leftovers: Mapping[str, Any] | None = None
    """Arguments of ``probe.end_leftovers``, which is called on each host first."""


class HostContext(NamedTuple):
    """A host and everything that it is compared with: the argument of a check."""

    report: HostReport
    local: HostReport
    """Of the host that the run is started on, whose Python, project and data count."""
    all_reports: Sequence[HostReport]
    """All hosts of the run, including this one, in the order of the hostfile."""
    examination: Examination
    request: Mapping[str, Any]
    """The arguments of ``probe.answer``."""

    def fact(self, name: str) -> Any:
        """The fact ``name`` of this host. Raises Unknown if the host could not collect it."""
        return self.report.fact(name)

    def fix(self, *words: str) -> str:
        """The command for the user to type that runs ``words`` on this host."""
        if self.report.without_ssh is not None:
            return shlex.join(words)
        port = self.examination.ssh_port
        flags = ["-p", str(port)] if port else []
        return " ".join(["ssh", *flags, self.report.host.name, shlex.quote(shlex.join(words))])

    def copy_command(self, *paths: str, folder: str, flags: Sequence[str] = ()) -> str:
        """The command that copies ``paths`` of the local host into a folder of this one."""
        port = self.examination.ssh_port
        shell = ["-e", f"ssh -p {port}"] if port else []
        name = self.report.host.name
        target = f"[{name}]:{folder}/" if ":" in name else f"{name}:{folder}/"
        return shlex.join(["rsync", "-a", *flags, *shell, *paths, target])


def probe_hosts(
    hosts: Sequence[Host], requests: Sequence[Mapping[str, Any]], port: int | None, seconds: float
) -> list[HostReport]:
    """The report of each host on its request, see ``probe.answer``; ``seconds`` is the limit for each host.

    If ssh to this machine fails, the report is made without it.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host, request: _probe_host(host, request, port, seconds), hosts, requests))


def probe_local_host(request: Mapping[str, Any], seconds: float) -> HostReport:
    """The report of the local host, by the same program."""
    return _run_probe(Host("this host", ()), [sys.executable, "-"], request, seconds)


def _probe_host(host: Host, request: Mapping[str, Any], port: int | None, seconds: float) -> HostReport:
    words = ["sh", "-c", _PYTHON, sys.executable]
    report = _run_probe(host, ssh_command(host.name, words, port), request, seconds)
    if not report.facts and is_this_host(host.name):
        report = probe_local_host(request, seconds)._replace(host=host, without_ssh=report.failure)
    return report


def _run_probe(host: Host, command: Sequence[str], request: Mapping[str, Any], seconds: float) -> HostReport:
    program = f"{_SOURCES}\nanswer({dict(request)!r})\n"
    # A file: ssh may leave a process that keeps a pipe open.
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
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return HostReport(host, failure=" ".join(said[-2:]) or "no output")


def _sources() -> str:
    parts = (reading, fingerprint, machine_id, folder_lock.start_time, probe)
    lines = "\n".join(inspect.getsource(part) for part in parts).split("\n")
    own = "\n".join(line for line in lines if not line.startswith("from megatron."))
    return f"from __future__ import annotations\n{own}"


_SOURCES = _sources()
"""The probe and what it uses of this project, as of now: files may be updated while an elastic agent runs."""
