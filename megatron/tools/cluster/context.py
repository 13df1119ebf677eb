"""What a check of a host reads, and what it returns."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.tools.cluster.probe_hosts import HostReport, on_host


class CheckResult(NamedTuple):
    """One line of the table."""

    ok: bool
    found: str
    fix: str | None = None
    """A command that fixes it, or shows what to fix."""


class Unknown(Exception):
    """A host could not collect a fact."""


class HostContext(NamedTuple):
    """A host and all that it is compared with. Checks read it and nothing else."""

    report: HostReport
    local: HostReport
    """Of the host that the run is started on, whose Python, project and data count."""
    all_reports: Sequence[HostReport]
    """All hosts of the run, this one among them, in the order of the hostfile."""
    run: RunConfig | None
    """None without training arguments."""
    device: str
    port: int
    """The master port."""
    ssh_port: int | None
    forwarded: Mapping[str, str]
    """What the launcher sets in the environment of the ranks there."""
    unforwarded: Sequence[str]
    """What is set here, has an effect, and is not sent."""
    files: Mapping[str, str]
    """Files that the training arguments name: flag to path."""
    folders: Mapping[str, str]
    """Folders that they name to be written in: flag to path."""
    data: Sequence[str]
    """The prefixes of the data sets."""
    project: str
    """The folder of this checkout."""

    def fact(self, name: str) -> Any:
        """The fact ``name`` of this host. Raises Unknown if the host could not collect it."""
        return fact_of(self.report, name)

    def fix(self, *words: str) -> str:
        """The command that runs ``words`` on this host."""
        return on_host(self.report, self.ssh_port, *words)

    def copy_command(self, *paths: str, folder: str, flags: Sequence[str] = ()) -> str:
        """The command that copies ``paths`` of the local host into a folder of this one."""
        shell = ["-e", f"ssh -p {self.ssh_port}"] if self.ssh_port else []
        name = self.report.host.name
        target = f"[{name}]:{folder}/" if ":" in name else f"{name}:{folder}/"
        return shlex.join(["rsync", "-a", *flags, *shell, *paths, target])


def fact_of(report: HostReport, name: str) -> Any:
    """The fact ``name`` of a report. Raises Unknown if there is none."""
    fact = report.facts.get(name, {"error": report.failure or "no answer"})
    if "error" in fact:
        raise Unknown(fact["error"])
    return fact["value"]
