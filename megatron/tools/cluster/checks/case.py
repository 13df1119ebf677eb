"""What a check is given, and what it gives back."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.config import RunConfig
from megatron.tools.cluster.survey import Answer, on_host


class Verdict(NamedTuple):
    """One line of the table."""

    ok: bool
    found: str
    fix: str | None = None
    """A command that mends it, or shows what to mend."""


class Unknown(Exception):
    """A host could not answer a question."""


class Case(NamedTuple):
    """A host, and all that its state is measured by. Checks read it and nothing else."""

    answer: Answer
    here: Answer
    """Of the host that the run is started on, whose Python, project and data are the ones that count."""
    others: Sequence[Answer]
    """All hosts of the run, this one among them, in the order of the hostfile."""
    run: RunConfig | None
    """None where no training arguments are given."""
    device: str
    port: int
    """The master port."""
    ssh_port: int | None
    forwarded: Mapping[str, str]
    """What the launcher sets in the environment of the ranks there."""
    unforwarded: Sequence[str]
    """What is set here, counts, and is not sent."""
    files: Mapping[str, str]
    """What the training arguments name to be read whole: flag to path."""
    folders: Mapping[str, str]
    """What they name to be written in: flag to path."""
    data: Sequence[str]
    """The prefixes of the data sets."""
    project: str
    """The folder of this checkout."""

    def fact(self, name: str) -> Any:
        """What this host says of ``name``. Raises Unknown where it could not tell."""
        return told(self.answer, name)

    def fix(self, *words: str) -> str:
        """The command that runs ``words`` on this host."""
        return on_host(self.answer, self.ssh_port, *words)

    def copy_command(self, *paths: str, folder: str, flags: Sequence[str] = ()) -> str:
        """The command that copies ``paths`` of this host into a folder of that one."""
        shell = ["-e", f"ssh -p {self.ssh_port}"] if self.ssh_port else []
        name = self.answer.host.name
        target = f"[{name}]:{folder}/" if ":" in name else f"{name}:{folder}/"
        return shlex.join(["rsync", "-a", *flags, *shell, *paths, target])


def told(answer: Answer, name: str) -> Any:
    """The fact ``name`` of an answer. Raises Unknown where there is none."""
    fact = answer.facts.get(name, {"error": answer.failure or "no answer"})
    if "error" in fact:
        raise Unknown(fact["error"])
    return fact["value"]
