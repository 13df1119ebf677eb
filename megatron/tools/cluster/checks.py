"""The checks of every host before a run, each with a command that fixes the problem."""

import hashlib
import ipaddress
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from megatron.checkpoint.snapshot_files import planned_host_bytes
from megatron.common.errors import DataError, counted
from megatron.data.indexed_dataset import IndexedDataset
from megatron.model.architectures import architecture_of
from megatron.tools.cluster.probe_hosts import CheckResult, HostContext, Unknown
from megatron.tools.cluster.remote import unforwarded_variables

_SHORT = 12
"""Number of characters of a hash that are shown."""
_LEAST_FREE = 1 << 30
"""Minimum free bytes on disk; the run itself checks the size of its checkpoints."""
_LEAST_MEMORY = 1 << 28
"""Minimum bytes of memory of a rank with its libraries."""
_SHARED = ("--save", "--load")
"""Folders that must be shared by all hosts, since all ranks read them when a run resumes."""

_SSH_FIXES = {
    "Could not resolve hostname": "echo 'ADDRESS {host}' | sudo tee -a /etc/hosts",
    "Permission denied": "test -e ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519; "
    "ssh-copy-id {port}{host}",
    "IDENTIFICATION HAS CHANGED": "ssh-keygen -R {host}  # once you know why its key has changed",
    "Host key verification failed": "ssh {port}{host} true  # once, and compare the fingerprint it shows",
    "Connection refused": "systemctl start ssh  # on {host} itself; or name its port with --ssh_port",
    "timed out": "ping -c 3 {host}  # is it up, and does a firewall let ssh through?",
    "No route to host": "ping -c 3 {host}  # is it up, and on this network?",
    "unreachable": "ping -c 3 {host}  # is it up, and on this network?",
}
"""Part of an error message of ssh to the command that fixes the problem."""
_OTHER_FIX = "ssh -v {port}{host} true"


def _verdict(problem: str | None, fix: str, fine: str) -> CheckResult:
    """A failure with ``problem`` and ``fix`` or, if there is no problem, a success with the text ``fine``."""
    return CheckResult(False, problem, fix) if problem else CheckResult(True, fine)


def check_ssh(host: HostContext) -> Iterator[CheckResult]:
    """ssh connects without a password, and Python answers. A run only on this host needs no ssh."""
    report = host.report
    if report.facts and report.without_ssh is None:
        yield CheckResult(True, "answers")
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


def check_port(host: HostContext) -> Iterator[CheckResult]:
    """The master port is free on the first host."""
    if host.report.host != host.all_reports[0].host:
        return
    port, owner = host.examination.master_port, host.fact("port")
    fix = f"{host.fix('ss', '-ltnp')} | grep :{port}  # or start with another --master_port"
    yield _verdict(owner and f"{port}: {owner}", fix, f"{port} is free")


def check_interface(host: HostContext) -> Iterator[CheckResult]:
    """The network interface set for gloo or NCCL exists; if none is set, gloo finds one that other hosts can reach.

    Ranks of a single host connect to its loopback.
    """
    network, on_cpu = host.fact("network"), host.examination.device == "cpu"
    variable = "GLOO_SOCKET_IFNAME" if on_cpu else "NCCL_SOCKET_IFNAME"
    sent, place = host.request["environ"], " in .deepspeed_env"
    if len(host.all_reports) == 1:  # its ranks inherit the variables of their launcher
        if error := network["loopback"]:
            found = f"127.0.0.1 cannot be reached ({error}); ranks connect to it"
            yield CheckResult(False, found, host.fix("ip", "link", "set", "lo", "up"))
            return
        sent, place = {**sent, **host.examination.environ}, ""
    setting = sent.get(variable)
    fine, problem = f"{variable}={setting}" if setting else "found automatically", None
    if setting:
        if missing := _missing_interfaces(setting, network["interfaces"], exactly=variable.startswith("GLOO")):
            problem = f"{variable}={setting}: no {', '.join(missing)}, only {', '.join(network['interfaces'])}"
    elif on_cpu and len(host.all_reports) > 1 and _only_here(network["own_addresses"]):
        own = ", ".join(network["own_addresses"]) or "no address"
        problem = f"its own name, {network['hostname']}, resolves to {own}, where no other host reaches it"
    yield _verdict(problem, f"{host.fix('ip', '-br', 'address')}  # then set {variable}{place}", fine)


def _missing_interfaces(setting: str, interfaces: Sequence[str], *, exactly: bool) -> list[str]:
    """The interfaces in ``setting`` that do not exist. NCCL accepts prefixes of names, and ^ to exclude interfaces."""
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
    """The Python interpreter that the launcher starts exists and has the same version as on this host."""
    local, remote, problem = host.local.fact("software"), host.fact("software"), None
    if remote["executable"] != sys.executable:
        problem = f"no {sys.executable}, only {remote['executable']} {remote['python']}"
    elif remote["python"] != local["python"]:
        problem = f"{remote['python']}, here {local['python']}"
    yield _verdict(problem, host.copy_command(sys.prefix, folder=str(Path(sys.prefix).parent)), remote["python"])


def check_versions(host: HostContext) -> Iterator[CheckResult]:
    """torch and deepspeed have the same versions as on this host."""
    local, remote = host.local.fact("software"), host.fact("software")
    for package in ("torch", "deepspeed"):
        found = f"{package} {remote[package] or 'is missing'}"
        problem = f"{found}, here {local[package]}" if remote[package] != local[package] else None
        install = host.fix(remote["executable"], "-m", "pip", "install", f"{package}=={local[package]}")
        yield _verdict(problem, install, found)


def check_project(host: HostContext) -> Iterator[CheckResult]:
    """The sources of the project are the same, in the same folder."""
    local, remote, project = host.local.fact("project"), host.fact("project"), host.request["project"]
    sources = [f"{project}/megatron", f"{project}/pretrain_gpt2.py"]
    if remote is None:
        fix = f"{host.fix('mkdir', '-p', project)} && {host.copy_command(*sources, folder=project)}"
        yield CheckResult(False, f"no pretrain_gpt2.py in {project}", fix)
        return
    problem, fix = None, host.copy_command(*sources, folder=project, flags=["--delete"])
    if remote["sources"] != local["sources"]:
        commits = f" (commit {remote['commit']}, here {local['commit']})"
        problem = "other sources" + (commits if remote["commit"] != local["commit"] else ", of the same commit")
    yield _verdict(problem, fix, f"commit {remote['commit']}" if remote["commit"] else remote["sources"][:_SHORT])


def check_arguments(host: HostContext) -> Iterator[CheckResult]:
    """Files named by the arguments have the same content as on this host."""
    if (run := host.examination.run) is None:
        return
    local, remote = host.local.fact("files"), host.fact("files")
    for flag, path in host.request["files"].items():
        if remote[flag] != local[flag] or "error" in remote[flag]:
            wrong = remote[flag].get("error", "differs from here")
            yield CheckResult(False, f"{flag} {path}: {wrong}", _copy(host, path))
    if remote == local and not any("error" in file for file in remote.values()):
        digest = hashlib.sha256(json.dumps([run.ds_config, remote], sort_keys=True, default=str).encode())
        yield CheckResult(True, f"hash {digest.hexdigest()[:_SHORT]}")


def check_data(host: HostContext) -> Iterator[CheckResult]:
    """The data sets exist, have the same tokens on all hosts, and are complete."""
    for prefix in host.request["data"]:
        remote = host.fact("data")[prefix]
        known = (
            (report, report.facts.get("data", {}).get("value", {}).get(prefix, {}))
            for report in (host.local, *host.all_reports)
        )
        first, expected = next((pair for pair in known if "value" in pair[1]), (host.report, remote))
        wrong = f": {remote['error']}" if "error" in remote else f" differs from {first.host.name}"
        problem = f"{prefix}{wrong}" if remote != expected or "error" in remote else None
        if not problem and remote == host.local.facts.get("data", {}).get("value", {}).get(prefix):
            problem = _damage(prefix)
        copy = _copy(host, f"{prefix}.bin", f"{prefix}.idx")
        yield _verdict(problem, copy, f"hash {remote.get('value', '')[:_SHORT]}")


@cache
def _damage(prefix: str) -> str | None:
    """What is wrong with the data set on this host, which the others have as well; None if it can be read."""
    try:
        IndexedDataset(prefix)
    except DataError as error:
        return error.messages[0]
    return None


def check_folders(host: HostContext) -> Iterator[CheckResult]:
    """Folders are writable, and the folders of checkpoints are shared by all hosts."""
    for flag, path in host.request["folders"].items():
        folder, problem, fix = host.fact("folders")[flag], None, ""
        place, several = folder["place"], flag in _SHARED and len(host.all_reports) > 1
        if not folder["is_folder"]:
            problem, fix = f"{place} is not a folder", host.fix("ls", "-l", path)
        elif not folder["writable"]:
            fix = f"{host.fix('chmod', 'u+rwx', place)}  # or mount it for writing"
            problem = f"no permission to write in {place}"
        elif flag in _SHARED and not _is_shared(host, flag):
            fix = f"{host.fix('findmnt', '-T', place)}  # mount one file system there on all hosts"
            problem = "not shared; a resume reads all ranks' files"
        fine = f"{flag} {path}: writable{', shared' if several else ''}"
        yield _verdict(problem and f"{flag} {path}: {problem}", fix, fine)


def check_disk(host: HostContext) -> Iterator[CheckResult]:
    """Enough disk space is free to begin with."""
    for flag, path in host.request["folders"].items():
        folder = host.fact("folders")[flag]
        free, least = folder["free"], _least_free(host, flag)
        text = f"{flag} {path}: {free / (1 << 30):.1f} GiB free"
        fix = None if free >= least else host.fix("df", "-h", folder["place"])
        yield CheckResult(free >= least, text, fix)


def _least_free(host: HostContext, flag: str) -> int:
    """Minimum free bytes; for snapshots their size, without the vocabulary unless its size is known from flags."""
    run = host.examination.run
    if flag != "--snapshot-dir" or run is None or architecture_of(run.model).provider is not None:
        return _LEAST_FREE
    return planned_host_bytes(run, len(host.report.host.slots))


def _is_shared(host: HostContext, flag: str) -> bool:
    """Whether this host and the first host that answers see the same folder."""
    first = next(report for report in host.all_reports if report.facts)
    mine, other = host.fact("folders")[flag], first.fact("folders")[flag]
    changes = {mine["changed"], other["changed"]} - {None}
    return mine["identity"] == other["identity"] and len(changes) <= 1


def _copy(host: HostContext, *paths: str) -> str:
    """The command line for the user that copies files of the local host, if it has them, to the same place."""
    folder = str(Path(paths[0]).parent)
    if not all(Path(path).exists() for path in paths):
        return f"ls {shlex.quote(folder)}  # the files are missing here, too: name others, or make them"
    return host.copy_command(*paths, folder=folder)


def check_devices(host: HostContext) -> Iterator[CheckResult]:
    """There is a device for each slot. On the CPU ranks share the cores, and must fit into memory."""
    devices, slots, kind = host.fact("devices"), host.report.host.slots, host.examination.device
    ranks, count, problem, fix = counted(len(slots), "rank"), devices["cuda"], None, ""
    fine = f"{ranks}; devices of kind {kind} cannot be counted from here"
    if kind == "cpu":
        fine = f"{ranks} on {counted(devices['cpu'], 'CPU core')}"
        if len(slots) * _LEAST_MEMORY > devices["memory"]:
            problem = f"{ranks} take more than the {devices['memory'] / (1 << 30):.1f} GiB of memory"
            most = devices["memory"] // _LEAST_MEMORY
            fix = f"{host.fix('free', '-g')}  # then slots={most} or fewer in the hostfile"
    elif kind == "cuda":
        fine = f"{ranks} on {counted(count, 'GPU')}"
        if max(slots) >= count:
            problem = f"{counted(count, 'GPU')}, but the hostfile or the flags ask for slot {max(slots)}"
            show = host.fix("nvidia-smi", "-L")
            fix = f"{show}  # then in the hostfile: slots={count}, or, without a GPU, no such line"
    yield _verdict(problem, fix, fine)


def check_environment(host: HostContext) -> Iterator[CheckResult]:
    """Environment variables of this host that affect ranks are sent to the other hosts."""
    examination, several = host.examination, len(host.all_reports) > 1
    unsent = unforwarded_variables(examination.environ, examination.device, Path.cwd()) if several else []
    lines = " ".join(f'"{name}=${name}"' for name in unsent)
    fix = f"printf '%s\\n' {lines} >> {shlex.quote(f'{Path.cwd()}/.deepspeed_env')}"
    fine = ", ".join(sorted(host.request["environ"])) or "nothing to send"
    yield _verdict(f"{', '.join(unsent)}: set here, not sent there" if unsent else None, fix, fine)


def check_leftovers(host: HostContext) -> Iterator[CheckResult]:
    """The processes of an earlier start of an elastic run have ended."""
    if host.examination.leftovers is not None:
        left = host.fact("leftovers")["left"]
        yield CheckResult(not left, f"{counted(left, 'process')} of the earlier start cannot be ended")


Check = Callable[[HostContext], Iterator[CheckResult]]

CHECKS: Mapping[str, Check] = {
    "ssh": check_ssh,
    "python": check_python,
    "versions": check_versions,
    "project": check_project,
    "arguments": check_arguments,
    "devices": check_devices,
    "data": check_data,
    "folders": check_folders,
    "leftovers": check_leftovers,
    "disk": check_disk,
    "port": check_port,
    "interface": check_interface,
    "environment": check_environment,
}
"""The checks in the order of the table. For a host that does not answer, only the first one runs."""


def check_host(host: HostContext) -> dict[str, list[CheckResult]]:
    """The results of one host by check, without checks that do not apply to this host or run."""
    names = CHECKS if host.report.facts else ("ssh",)
    results = {name: _results(CHECKS[name], host) for name in names}
    return {name: lines for name, lines in results.items() if lines}


def _results(check: Check, host: HostContext) -> list[CheckResult]:
    try:
        return list(check(host))
    except Unknown as error:
        return [CheckResult(False, f"not known: {error}", f"ssh {host.report.host.name}  # and look")]
