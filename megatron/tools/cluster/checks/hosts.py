"""Whether a host can be found, and entered without a password."""

import ipaddress
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.tools.cluster.checks.case import Case, Verdict, told

_CURES = {
    "Permission denied": "test -e ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519; "
    "ssh-copy-id {port}{host}",
    "IDENTIFICATION HAS CHANGED": "ssh-keygen -R {host}  # once you know why its key is another",
    "Host key verification failed": "ssh {port}{host} true  # once, and compare the fingerprint it shows",
    "Connection refused": "systemctl start ssh  # on {host} itself; or name its port with --ssh_port",
    "timed out": "ping -c 3 {host}  # is it up, and does a firewall let ssh through?",
    "No route to host": "ping -c 3 {host}  # is it up, and on this network?",
    "unreachable": "ping -c 3 {host}  # is it up, and on this network?",
}
"""By what ssh says."""
_OTHERWISE = "ssh -v {port}{host} true"


def check_name(case: Case) -> Iterator[Verdict]:
    """Its name stands for an address."""
    host, address = case.answer.host.name, case.answer.address
    if address is None:
        yield Verdict(False, "stands for no address", f"echo 'ADDRESS {host}' | sudo tee -a /etc/hosts")
    else:
        yield Verdict(True, address)


def check_ssh(case: Case) -> Iterator[Verdict]:
    """ssh enters it without asking, and a python answers."""
    answer = case.answer
    if answer.address is None:
        return
    if answer.facts:
        yield Verdict(True, f"answers after {answer.seconds:.1f} s")
        return
    said = answer.failure or "it said nothing"
    cure = next((cure for words, cure in _CURES.items() if words in said), _OTHERWISE)
    port = f"-p {case.ssh_port} " if case.ssh_port else ""
    yield Verdict(False, said, cure.format(host=answer.host.name, port=port))


_MOST_SECONDS_APART = 5


def check_clock(case: Case) -> Iterator[Verdict]:
    """Its clock shows what this host's does."""
    ahead = case.answer.clock
    if abs(ahead) > _MOST_SECONDS_APART:
        way = "ahead of" if ahead > 0 else "behind"
        yield Verdict(
            False, f"{abs(ahead):.0f} s {way} this host's", case.fix("sudo", "timedatectl", "set-ntp", "true")
        )
    else:
        yield Verdict(True, f"{abs(ahead):.1f} s apart")


def check_port(case: Case) -> Iterator[Verdict]:
    """The first host has the master port to give."""
    if case.answer.host != case.others[0].host:
        return
    if owner := case.fact("port"):
        yield Verdict(
            False,
            f"{case.port}: {owner}",
            f"{case.fix('ss', '-ltnp')} | grep :{case.port}  # or start with another --master_port",
        )
    else:
        yield Verdict(True, f"{case.port} is free")


def check_interface(case: Case) -> Iterator[Verdict]:
    """The interface that gloo or NCCL is told to use is there; told nothing, gloo finds one that others can reach."""
    network = case.fact("network")
    variable = "GLOO_SOCKET_IFNAME" if case.device == "cpu" else "NCCL_SOCKET_IFNAME"
    wanted = case.forwarded.get(variable)
    show = f"{case.fix('ip', '-br', 'address')}  # then set {variable} in .deepspeed_env"
    if wanted:
        lost = _not_there(wanted, network["interfaces"], exactly=variable.startswith("GLOO"))
        if lost:
            there = ", ".join(network["interfaces"])
            yield Verdict(False, f"{variable}={wanted}: no {', '.join(lost)}, only {there}", show)
        else:
            yield Verdict(True, f"{variable}={wanted}")
    elif case.device == "cpu" and len(case.others) > 1 and _only_here(network["own_addresses"]):
        own = ", ".join(network["own_addresses"]) or "no address"
        yield Verdict(
            False,
            f"its own name, {network['hostname']}, stands for {own}, where no other host reaches it",
            f"echo {variable}={network['default_interface'] or 'INTERFACE'} >> .deepspeed_env",
        )
    else:
        yield Verdict(True, "found by itself")


def _not_there(wanted: str, interfaces: Sequence[str], *, exactly: bool) -> list[str]:
    """The interfaces of a list that there are none of. NCCL takes beginnings of names, and ^ for all but these."""
    if wanted.startswith("^"):
        return []
    exactly = exactly or wanted.startswith("=")
    names = [name.partition(":")[0] for name in wanted.removeprefix("=").split(",") if name]
    if exactly:
        return [name for name in names if name not in interfaces]
    return [name for name in names if not any(there.startswith(name) for there in interfaces)]


def _only_here(addresses: Sequence[str]) -> bool:
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


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
