"""Whether a host has the same programs as the one that the run is started on, and the devices for its ranks."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.cluster.checks.case import Case, Verdict, told

_SHORT = 12


def check_python(case: Case) -> Iterator[Verdict]:
    """The interpreter that the launcher names is there, and is the same."""
    here, there = told(case.here, "software"), case.fact("software")
    copy = case.copy_command(sys.prefix, folder=str(Path(sys.prefix).parent))
    if there["executable"] != sys.executable:
        yield Verdict(False, f"no {sys.executable}, only {there['executable']} {there['python']}", copy)
    elif there["python"] != here["python"]:
        yield Verdict(False, f"{there['python']}, here {here['python']}", copy)
    else:
        yield Verdict(True, there["python"])


def check_versions(case: Case) -> Iterator[Verdict]:
    """torch and deepspeed are those of this host."""
    here, there = told(case.here, "software"), case.fact("software")
    for package in ("torch", "deepspeed"):
        if there[package] == here[package]:
            yield Verdict(True, f"{package} {there[package]}")
        else:
            install = case.fix(there["executable"], "-m", "pip", "install", f"{package}=={here[package]}")
            yield Verdict(False, f"{package} {there[package] or 'is missing'}, here {here[package]}", install)


def check_project(case: Case) -> Iterator[Verdict]:
    """The same sources, in the same folder."""
    here, there = told(case.here, "project"), case.fact("project")
    sources = [f"{case.project}/megatron", f"{case.project}/pretrain_gpt2.py"]
    if there is None:
        yield Verdict(
            False,
            f"no pretrain_gpt2.py in {case.project}",
            f"{case.fix('mkdir', '-p', case.project)} && {case.copy_command(*sources, folder=case.project)}",
        )
    elif there["sources"] != here["sources"]:
        commits = f"commit {there['commit']}, here {here['commit']}"
        changed = "other sources" + (f" ({commits})" if there["commit"] != here["commit"] else ", of the same commit")
        yield Verdict(False, changed, case.copy_command(*sources, folder=case.project, flags=["--delete"]))
    else:
        yield Verdict(True, f"commit {there['commit']}" if there["commit"] else there["sources"][:_SHORT])


def check_devices(case: Case) -> Iterator[Verdict]:
    """A device for each slot. On the CPU any number of ranks share the cores."""
    found, slots = case.fact("devices"), case.answer.host.slots
    if case.device == "cpu":
        yield Verdict(True, f"{len(slots)} ranks on {found['cpu']} CPU cores")
    elif case.device != "cuda":
        yield Verdict(True, f"{len(slots)} ranks; devices of kind {case.device} cannot be counted from here")
    elif max(slots) >= found["cuda"]:
        count = found["cuda"]
        yield Verdict(
            False,
            f"{count} GPUs, and slot {max(slots)} is asked for",
            f"{case.fix('nvidia-smi', '-L')}  # then in the hostfile: slots={count}, or, without a GPU, no such line",
        )
    else:
        yield Verdict(True, f"{len(slots)} ranks on {found['cuda']} GPUs")


def check_locks(case: Case) -> Iterator[Verdict]:
    """No lock of a build that was killed, for which torch would wait for ever."""
    locks = case.fact("locks")
    if locks:
        yield Verdict(False, f"stale lock {', '.join(locks)}", case.fix("rm", *locks))
    else:
        yield Verdict(True, "no stale lock")


def check_environment(case: Case) -> Iterator[Verdict]:
    """What is set here, and counts, is set there."""
    if case.unforwarded:
        lines = " ".join(f'"{name}=${name}"' for name in case.unforwarded)
        yield Verdict(
            False,
            f"{', '.join(case.unforwarded)}: set here, not sent there",
            f"printf '%s\\n' {lines} >> {shlex.quote(f'{Path.cwd()}/.deepspeed_env')}",
        )
    else:
        yield Verdict(True, ", ".join(sorted(case.forwarded)) or "nothing to send")
