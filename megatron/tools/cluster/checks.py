"""What is checked on every host before a run can start, each with the command that fixes it."""

import ipaddress
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron.common.errors import counted
from megatron.tools.cluster.file_checks import SHORT, check_arguments, check_data, check_disk, check_folders
from megatron.tools.cluster.probe_hosts import CheckResult, HostContext, Unknown

_SSH_FIXES = {
    "Permission denied": "test -e ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519; "
    "ssh-copy-id {port}{host}",
    "IDENTIFICATION HAS CHANGED": "ssh-keygen -R {host}  # once you know why its key has changed",
    "Host key verification failed": "ssh {port}{host} true  # once, and compare the fingerprint it shows",
    "Connection refused": "systemctl start ssh  # on {host} itself; or name its port with --ssh_port",
    "timed out": "ping -c 3 {host}  # is it up, and does a firewall let ssh through?",
    "No route to host": "ping -c 3 {host}  # is it up, and on this network?",
    "unreachable": "ping -c 3 {host}  # is it up, and on this network?",
}
"""By the message of ssh."""
_OTHER_FIX = "ssh -v {port}{host} true"


def check_name(host: HostContext) -> Iterator[CheckResult]:
    """Its name resolves."""
    name, address = host.report.host.name, host.report.address
    if address is None:
        yield CheckResult(False, "does not resolve", f"echo 'ADDRESS {name}' | sudo tee -a /etc/hosts")
    else:
        yield CheckResult(True, address)


def check_ssh(host: HostContext) -> Iterator[CheckResult]:
    """ssh connects without a password, and a python answers. A run on this host only needs no ssh."""
    report = host.report
    if report.address is None:
        return
    if report.facts and report.without_ssh is None:
        yield CheckResult(True, f"answers after {report.seconds:.1f} s")
        return
    if report.facts and len(host.all_reports) == 1:
        yield CheckResult(True, f"not used: {report.without_ssh}; tools/launch.py needs none for this host only")
        return
    failure = report.failure or "no output"
    if report.without_ssh is not None:
        failure = f"{report.without_ssh}; all that follows was checked without ssh"
    fix = next((fix for text, fix in _SSH_FIXES.items() if text in failure), _OTHER_FIX)
    port = f"-p {host.examination.ssh_port} " if host.examination.ssh_port else ""
    yield CheckResult(False, failure, fix.format(host=report.host.name, port=port))


_MOST_SECONDS_APART = 5


def check_clock(host: HostContext) -> Iterator[CheckResult]:
    """Its clock agrees with this host's."""
    ahead = host.report.clock
    if abs(ahead) > _MOST_SECONDS_APART:
        way = "ahead of" if ahead > 0 else "behind"
        yield CheckResult(
            False, f"{abs(ahead):.0f} s {way} this host's", host.fix("sudo", "timedatectl", "set-ntp", "true")
        )
    else:
        yield CheckResult(True, f"{abs(ahead):.1f} s apart")


def check_port(host: HostContext) -> Iterator[CheckResult]:
    """The master port is free on the first host."""
    if host.report.host != host.all_reports[0].host:
        return
    port = host.examination.master_port
    if owner := host.fact("port"):
        fix = f"{host.fix('ss', '-ltnp')} | grep :{port}  # or start with another --master_port"
        yield CheckResult(False, f"{port}: {owner}", fix)
    else:
        yield CheckResult(True, f"{port} is free")


def check_interface(host: HostContext) -> Iterator[CheckResult]:
    """The interface that gloo or NCCL is set to use exists; without one, gloo finds one that other hosts reach."""
    network, on_cpu = host.fact("network"), host.examination.device == "cpu"
    variable = "GLOO_SOCKET_IFNAME" if on_cpu else "NCCL_SOCKET_IFNAME"
    setting = host.forwarded.get(variable)
    show = f"{host.fix('ip', '-br', 'address')}  # then set {variable} in .deepspeed_env"
    if setting:
        missing = _missing_interfaces(setting, network["interfaces"], exactly=variable.startswith("GLOO"))
        if missing:
            known = ", ".join(network["interfaces"])
            yield CheckResult(False, f"{variable}={setting}: no {', '.join(missing)}, only {known}", show)
        else:
            yield CheckResult(True, f"{variable}={setting}")
    elif on_cpu and len(host.all_reports) > 1 and _only_here(network["own_addresses"]):
        own = ", ".join(network["own_addresses"]) or "no address"
        yield CheckResult(
            False,
            f"its own name, {network['hostname']}, resolves to {own}, where no other host reaches it",
            f"echo {variable}={network['default_interface'] or 'INTERFACE'} >> .deepspeed_env",
        )
    else:
        yield CheckResult(True, "found automatically")


def _missing_interfaces(setting: str, interfaces: Sequence[str], *, exactly: bool) -> list[str]:
    """The interfaces of a list that do not exist. NCCL takes prefixes of names, and ^ for all but these."""
    if setting.startswith("^"):
        return []
    exactly = exactly or setting.startswith("=")
    names = [name.partition(":")[0] for name in setting.removeprefix("=").split(",") if name]
    if exactly:
        return [name for name in names if name not in interfaces]
    return [name for name in names if not any(interface.startswith(name) for interface in interfaces)]


def _only_here(addresses: Sequence[str]) -> bool:
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def check_python(host: HostContext) -> Iterator[CheckResult]:
    """The interpreter that the launcher starts exists and has the same version."""
    local, remote = host.local.fact("software"), host.fact("software")
    copy = host.copy_command(sys.prefix, folder=str(Path(sys.prefix).parent))
    if remote["executable"] != sys.executable:
        yield CheckResult(False, f"no {sys.executable}, only {remote['executable']} {remote['python']}", copy)
    elif remote["python"] != local["python"]:
        yield CheckResult(False, f"{remote['python']}, here {local['python']}", copy)
    else:
        yield CheckResult(True, remote["python"])


def check_versions(host: HostContext) -> Iterator[CheckResult]:
    """torch and deepspeed have the versions of this host."""
    local, remote = host.local.fact("software"), host.fact("software")
    for package in ("torch", "deepspeed"):
        if remote[package] == local[package]:
            yield CheckResult(True, f"{package} {remote[package]}")
        else:
            install = host.fix(remote["executable"], "-m", "pip", "install", f"{package}=={local[package]}")
            yield CheckResult(False, f"{package} {remote[package] or 'is missing'}, here {local[package]}", install)


def check_project(host: HostContext) -> Iterator[CheckResult]:
    """The same sources, in the same folder."""
    local, remote = host.local.fact("project"), host.fact("project")
    project = host.request["project"]
    sources = [f"{project}/megatron", f"{project}/pretrain_gpt2.py"]
    if remote is None:
        yield CheckResult(
            False,
            f"no pretrain_gpt2.py in {project}",
            f"{host.fix('mkdir', '-p', project)} && {host.copy_command(*sources, folder=project)}",
        )
    elif remote["sources"] != local["sources"]:
        commits = f"commit {remote['commit']}, here {local['commit']}"
        changed = "other sources" + (f" ({commits})" if remote["commit"] != local["commit"] else ", of the same commit")
        yield CheckResult(False, changed, host.copy_command(*sources, folder=project, flags=["--delete"]))
    else:
        yield CheckResult(True, f"commit {remote['commit']}" if remote["commit"] else remote["sources"][:SHORT])


def check_devices(host: HostContext) -> Iterator[CheckResult]:
    """A device for each slot. On the CPU any number of ranks share the cores."""
    devices, slots, kind = host.fact("devices"), host.report.host.slots, host.examination.device
    if kind == "cpu":
        yield CheckResult(True, f"{counted(len(slots), 'rank')} on {counted(devices['cpu'], 'CPU core')}")
    elif kind != "cuda":
        yield CheckResult(True, f"{counted(len(slots), 'rank')}; devices of kind {kind} cannot be counted from here")
    elif max(slots) >= devices["cuda"]:
        count = devices["cuda"]
        yield CheckResult(
            False,
            f"{counted(count, 'GPU')}, but the hostfile or the flags ask for slot {max(slots)}",
            f"{host.fix('nvidia-smi', '-L')}  # then in the hostfile: slots={count}, or, without a GPU, no such line",
        )
    else:
        yield CheckResult(True, f"{counted(len(slots), 'rank')} on {counted(devices['cuda'], 'GPU')}")


def check_locks(host: HostContext) -> Iterator[CheckResult]:
    """No lock of a killed build, for which torch would wait forever."""
    locks = host.fact("locks")
    if locks:
        yield CheckResult(False, f"stale lock {', '.join(locks)}", host.fix("rm", *locks))
    else:
        yield CheckResult(True, "no stale lock")


def check_environment(host: HostContext) -> Iterator[CheckResult]:
    """Variables set here that have an effect are set there."""
    if host.unforwarded:
        lines = " ".join(f'"{name}=${name}"' for name in host.unforwarded)
        yield CheckResult(
            False,
            f"{', '.join(host.unforwarded)}: set here, not sent there",
            f"printf '%s\\n' {lines} >> {shlex.quote(f'{Path.cwd()}/.deepspeed_env')}",
        )
    else:
        yield CheckResult(True, ", ".join(sorted(host.forwarded)) or "nothing to send")


Check = Callable[[HostContext], Iterator[CheckResult]]

FIRST: Mapping[str, Check] = {"name": check_name, "ssh": check_ssh}
"""Without these a host cannot be probed."""

CHECKS: Mapping[str, Check] = {
    "python": check_python,
    "versions": check_versions,
    "project": check_project,
    "arguments": check_arguments,
    "devices": check_devices,
    "data": check_data,
    "folders": check_folders,
    "disk": check_disk,
    "clock": check_clock,
    "port": check_port,
    "interface": check_interface,
    "extensions": check_locks,
    "environment": check_environment,
}
"""For a host that answers, in the order of the table."""


def check_host(host: HostContext) -> dict[str, list[CheckResult]]:
    """The results of one host, by check. A check that does not apply to it, or to this run, has none."""
    results = {name: list(check(host)) for name, check in FIRST.items()}
    if host.report.facts:
        results |= {name: _results(check, host) for name, check in CHECKS.items()}
    return {name: lines for name, lines in results.items() if lines}


def _results(check: Check, host: HostContext) -> list[CheckResult]:
    try:
        return list(check(host))
    except Unknown as error:
        return [CheckResult(False, f"not known: {error}", f"ssh {host.report.host.name}  # and look")]
