"""Probe many hosts at once: send each the probe over ssh and gather the reports; and the all-reduce test over all."""

import inspect
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint import folder_lock
from megatron.common import reading
from megatron.config import RunConfig
from megatron.data import fingerprint
from megatron.launch.environment import extensions_folder
from megatron.tools.cluster import probe
from megatron.tools.cluster.hostfile import Host, is_this_host, runs_here_alone
from megatron.tools.cluster.remote import forwarded_variables, ssh_command

_AT_ONCE = 64
_RESOLVE_SECONDS = 15.0
"""More than it takes to start a program on a machine with a high load."""
# The launcher will start the python of this path, so that one runs the probe, if it exists.
_PYTHON = 'if [ -x "$0" ]; then exec "$0" -; else exec python3 -; fi'


class Unknown(Exception):
    """A host could not collect a fact."""


class HostReport(NamedTuple):
    """What a host reported."""

    host: Host
    address: str | None = None
    """That its name resolves to; None if it does not."""
    failure: str | None = None
    """Why there are no facts: mostly ssh's last lines."""
    facts: Mapping[str, Any] = {}
    """By the names of ``probe.FACTS``: {"value": ...} or {"error": ...}."""
    seconds: float = 0.0
    """Until the first line of output."""
    without_ssh: str | None = None
    """Why the facts were collected without ssh, on this machine; None if it was used."""
    clock: float = 0.0
    """Seconds that its clock is ahead of this host's, up to the latency of the network."""

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
    forwarded: Mapping[str, str]
    """What the launcher sets in the environment of the ranks there."""
    unforwarded: Sequence[str]
    """Variables that are set here and affect the ranks, but are not sent."""

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
    address = _address(host.name, port)
    if address is None:
        return HostReport(host, failure="its name does not resolve")
    words = ["sh", "-c", _PYTHON, sys.executable]
    report = _run_probe(host, ssh_command(host.name, words, port), request, seconds)
    if not report.facts and is_this_host(host.name):
        report = probe_local_host(request, seconds)._replace(host=host, without_ssh=report.failure)
    return report._replace(address=address)


def _address(name: str, port: int | None) -> str | None:
    """The address that ssh connects to for ``name``, which only its configuration may define."""
    told = _output([*ssh_command(name, [], port)[:1], "-G", "--", name]) or ""
    settings = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    if {"proxyjump", "proxycommand"} & set(settings):
        return name  # resolved elsewhere
    # In another process: a resolver without an answer cannot be stopped.
    found = _output(["getent", "ahosts", settings.get("hostname", name)])
    return found.split(None, 1)[0] if found else None


def _output(command: Sequence[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_RESOLVE_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _run_probe(host: Host, command: Sequence[str], request: Mapping[str, Any], seconds: float) -> HostReport:
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            )
        except OSError as error:
            return HostReport(host, failure=f"{command[0]}: {error.strerror}")
        limit = threading.Timer(seconds, process.kill)
        limit.start()
        try:
            report = _exchange(HostReport(host), process, f"{_SOURCES}\nanswer({dict(request)!r})\n", start)
        finally:
            limit.cancel()
            process.kill()
            process.wait()
        if report.facts:
            return report
        errors.seek(0)
        said = [line.strip() for line in errors.read().splitlines() if line.strip()]
        silent = f"no report within {seconds:g} s" if time.monotonic() - start >= seconds else "no output"
        return report._replace(failure=" ".join(said[-2:]) or silent)


def _exchange(report: HostReport, process: subprocess.Popen, program: str, start: float) -> HostReport:
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as pipe:
            pipe.write(program)
    except BrokenPipeError:
        return report
    for line in process.stdout:
        if not line.startswith(probe.MARK):
            continue
        said = json.loads(line.removeprefix(probe.MARK))
        if report.seconds:
            return report._replace(facts=said)
        report = report._replace(seconds=time.monotonic() - start, clock=said["time"] - time.time())
    return report


def _sources() -> str:
    parts = (reading, fingerprint, extensions_folder, folder_lock.machine_id, folder_lock.start_time, probe)
    lines = "\n".join(inspect.getsource(part) for part in parts).split("\n")
    own = "\n".join(line for line in lines if not line.startswith("from megatron."))
    return f"from __future__ import annotations\n{own}"


_SOURCES = _sources()
"""The probe and what it uses of this project, as of now: files may be updated while an elastic agent runs."""


class AllReduceResult(NamedTuple):
    """Bandwidth or failures of the all-reduce test."""

    bytes_per_second: float | None
    """Bus bandwidth, which does not depend on the number of ranks; None if the test failed."""
    failures: Mapping[str, str]
    """The last line of output of each host that failed."""


def all_reduce(examination: Examination, reports: Sequence[HostReport]) -> AllReduceResult:
    """Run an all-reduce over all slots of all hosts, which have all reported."""
    seconds = examination.seconds
    common = {
        "address": examination.master_address or _own_address(reports[0], examination),
        "port": examination.master_port,
        "device": examination.device,
        "environ": forwarded_variables(examination.environ, examination.device, Path.cwd()),
        "seconds": seconds,
        "world_size": sum(len(report.host.slots) for report in reports),
    }
    first_rank, programs = 0, []
    for report in reports:
        request = {**common, "first_rank": first_rank, "slots": report.host.slots}
        programs.append(f"{_SOURCES}\nstart_all_reduce({_SOURCES!r}, {request!r})\n")
        first_rank += len(report.host.slots)

    def start(report: HostReport, program: str) -> subprocess.CompletedProcess:
        words = [sys.executable, "-"]
        command = (
            words if report.without_ssh is not None else ssh_command(report.host.name, words, examination.ssh_port)
        )
        try:
            return subprocess.run(
                command, input=program, capture_output=True, text=True, errors="replace", timeout=2 * seconds + 10
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", "it did not end")

    with ThreadPoolExecutor(len(reports)) as pool:
        ended = list(pool.map(start, reports, programs))
    failures = {
        report.host.name: _last_line(done.stderr)
        for report, done in zip(reports, ended, strict=True)
        if done.returncode
    }
    found = [line for line in ended[0].stdout.splitlines() if line.startswith(probe.ALL_REDUCE_MARK)]
    speed = (
        json.loads(found[0].removeprefix(probe.ALL_REDUCE_MARK))["bytes_per_second"] if found and not failures else None
    )
    return AllReduceResult(speed, failures)


def _own_address(first: HostReport, examination: Examination) -> str:
    """The address for the rendezvous: DeepSpeed takes the first one that the first host lists."""
    listed = None if runs_here_alone(examination.hosts) else first.facts["network"].get("value", {}).get("address")
    return listed or first.address or first.host.name


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without output"
