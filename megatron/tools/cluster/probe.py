"""The probe: a program that is sent to hosts and collects facts about them.

Hosts may not have this project, so it only uses the standard library, and its source is sent after the source of the
functions that it uses. It prints the facts as one line of JSON and changes nothing, except that for an elastic run it
first kills the processes that an earlier start has left.
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

from megatron.checkpoint.folder_lock import start_time
from megatron.common.processes import machine_id
from megatron.data.fingerprint import data_hash
from megatron.launch.host_limits import connect_to_itself

MARK = "megatron-probe "
"""Prefix of the line of output, since shells may print other lines before."""


def answer(request: dict) -> None:
    """Collect and print the facts.

    Args:
        request: ``project``, ``files`` (flag to path), ``data`` (prefixes), ``folders`` (flag to path),
            ``port`` (to listen on, or None), ``environ`` (variables that the launcher will set on this host), and
            ``leftovers`` (arguments of ``end_leftovers``, or None).
    """
    os.environ.update(request["environ"])
    facts = {name: _attempt(collect, request) for name, collect in FACTS.items()}
    print(MARK + json.dumps(facts), flush=True)


def _attempt(collect, request):
    try:
        return {"value": collect(request)}
    except Exception as error:  # other facts are still useful
        return {"error": getattr(error, "strerror", None) or str(error) or type(error).__name__}


def _leftovers(request):
    return request["leftovers"] and end_leftovers(**request["leftovers"])


def end_leftovers(variable, seconds, owner):
    """Kill all processes of the run. Returns how many are left, and whether the owner of its lock has ended.

    Args:
        variable: NAME=VALUE in the environment of all processes of the run. Only processes of this user are killed,
            since environments of other users' processes cannot be read.
        seconds: how long to wait for the processes to end.
        owner: machine, process id and start time of the process that holds the lock of the checkpoint folder, or None.
    """
    deadline = time.monotonic() + seconds
    while (left := _processes(variable)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    has_ended = owner is not None and owner[0] == machine_id() and start_time(owner[1]) != owner[2]
    return {"left": len(left), "owner_has_ended": has_ended}


def _processes(variable):
    """Ids of running processes with ``variable`` in their environment."""
    variable_bytes, pids = variable.encode(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and start_time(int(name)):
                with open(f"/proc/{name}/environ", "rb") as file:
                    if variable_bytes in file.read().split(b"\0"):
                        pids.append(int(name))
    return pids


def _software(request):
    facts: dict[str, str | None] = {"executable": sys.executable, "python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "deepspeed"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _project(request):
    root = request["project"]
    if not os.path.isfile(os.path.join(root, "pretrain_gpt2.py")):
        return None
    sources = ["pretrain_gpt2.py", *sorted(glob.glob("megatron/**/*.py", root_dir=root, recursive=True))]
    digest = hashlib.sha256()
    for name in sources:
        with open(os.path.join(root, name), "rb") as file:
            digest.update(f"\n{name}\n".encode() + file.read())
    return {"sources": digest.hexdigest(), "commit": _output("git", "-C", root, "rev-parse", "--short=12", "HEAD")}


def _files(request):
    return {flag: _attempt(_digest, path) for flag, path in request["files"].items()}


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _data(request):
    return {prefix: _attempt(data_hash, prefix) for prefix in request["data"]}


def _folders(request):
    return {flag: _folder(path) for flag, path in request["folders"].items()}


def _folder(path):
    """Facts about a folder, or about its first parent that exists."""
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    status, age = os.stat(existing), time.time() - os.stat(existing).st_mtime
    return {
        "place": existing,
        "is_folder": os.path.isdir(existing),
        "writable": os.access(existing, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(existing).free,
        # Equal on all hosts that share the folder, regardless of the mount point.
        "identity": [status.st_ino, os.statvfs(existing).f_fsid],
        "changed": status.st_mtime_ns if age > 600 else None,  # hosts may see recent changes at different times
    }


def _devices(request):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cuda": len(glob.glob("/dev/nvidia[0-9]*")), "cpu": len(os.sched_getaffinity(0)), "memory": memory}


def _network(request):
    try:
        own = sorted({info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        own = []
    return {
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "hostname": socket.gethostname(),
        "own_addresses": own,
        "loopback": _attempt(lambda _: connect_to_itself(), request).get("error"),
        "address": (_output("hostname", "-I") or "").split(" ")[0],
    }


def _port(request):
    """Why the port cannot be used, such as the process that uses it; None if it is free."""
    if request["port"] is None:
        return None
    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    try:
        socket.create_server(("", request["port"]), family=family, dualstack_ipv6=dualstack).close()
    except PermissionError:
        return "this user has no permission to open it"
    except OSError:
        return _owner(request["port"]) or "another process uses it"
    return None


def _owner(port):
    listed = _output("ss", "-Hltnp", f"sport = :{port}") or ""
    match = re.search(r'\("(?P<name>[^"]+)",pid=(?P<pid>\d+)', listed)
    return match and f"{match['name']} (process {match['pid']}) uses it"


def _output(*command):
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()


FACTS = {
    "leftovers": _leftovers,
    "software": _software,
    "project": _project,
    "files": _files,
    "data": _data,
    "folders": _folders,
    "devices": _devices,
    "network": _network,
    "port": _port,
}
