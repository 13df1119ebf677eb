"""The facts of a host, and the all-reduce test: a program that is sent to hosts, which may not have this project.

The probe uses only the standard library, prints the facts as one line of JSON and changes nothing, except that for an
elastic run it first kills the processes that an earlier start has left. Its source is sent after the source of what it
uses.
"""

import contextlib
import datetime
import fcntl
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

from megatron.checkpoint.folder_lock import machine_id, start_time
from megatron.data.fingerprint import data_hash
from megatron.launch.environment import extensions_folder

MARK = "megatron-probe "
"""Begins each of its two lines of output: shells may print others before."""
ALL_REDUCE_MARK = "megatron-allreduce "
MIB = 1 << 20


def answer(request: dict) -> None:
    """Print the time, then the facts.

    Args:
        request: ``project``, ``files`` (flag to path), ``data`` (prefixes), ``folders`` (flag to path),
            ``port`` (to listen on, or None), ``environ``, which the launcher will set here, and ``leftovers``: None,
            or the arguments of ``end_leftovers``.
    """
    print(MARK + json.dumps({"time": time.time()}), flush=True)
    os.environ.update(request["environ"])
    facts = {name: _attempt(collect, request) for name, collect in FACTS.items()}
    print(MARK + json.dumps(facts), flush=True)


def _attempt(collect, request):
    try:
        return {"value": collect(request)}
    except Exception as error:  # the other facts are useful nevertheless
        return {"error": getattr(error, "strerror", None) or str(error) or type(error).__name__}


def _leftovers(request):
    return request["leftovers"] and end_leftovers(**request["leftovers"])


def end_leftovers(variable, seconds, owner):
    """Kill every process of the run. Returns how many are left, and whether the owner of its lock has ended.

    Args:
        variable: NAME=VALUE in the environment of all processes of the run. All of them belong to this user, since the
            environments of others cannot be read.
        seconds: how long to wait for their end.
        owner: machine, process id and start time of the process that holds the lock of the checkpoints, or None.
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
    """Processes that have ``variable`` in their environment and have not ended."""
    word, found = variable.encode(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and start_time(int(name)):
                with open(f"/proc/{name}/environ", "rb") as file:
                    if word in file.read().split(b"\0"):
                        found.append(int(name))
    return found


def _software(request):
    found: dict[str, str | None] = {"executable": sys.executable, "python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("torch", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


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
    """The folder, or the first of its parents that exists."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    status, age = os.stat(place), time.time() - os.stat(place).st_mtime
    return {
        "place": place,
        "is_folder": os.path.isdir(place),
        "writable": os.access(place, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(place).free,
        # Equal on all hosts that share the folder, wherever it is mounted.
        "identity": [status.st_ino, os.statvfs(place).f_fsid],
        "changed": status.st_mtime_ns if age > 600 else None,  # hosts may see recent changes at different times
    }


def _devices(request):
    return {"cuda": len(glob.glob("/dev/nvidia[0-9]*")), "cpu": len(os.sched_getaffinity(0))}


def _network(request):
    try:
        own = sorted({place[4][0] for place in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        own = []
    return {
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "hostname": socket.gethostname(),
        "own_addresses": own,
        "default_interface": _default_interface(),
        "address": (_output("hostname", "-I") or "").split(" ")[0],
    }


def _default_interface():
    with open("/proc/net/route") as file:
        routes = [line.split() for line in file][1:]
    return next((route[0] for route in routes if route[1] == "00000000"), None)


def _port(request):
    """Which process uses the port; None if it is free."""
    if request["port"] is None:
        return None
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if server.family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            server.bind(("", request["port"]))
            server.listen()
        except PermissionError:
            return "this user has no permission to open it"
        except OSError:
            return _owner(request["port"]) or "another process uses it"
    return None


def _owner(port):
    listed = _output("ss", "-Hltnp", f"sport = :{port}") or ""
    match = re.search(r'\("(?P<name>[^"]+)",pid=(?P<pid>\d+)', listed)
    return match and f"{match['name']} (process {match['pid']}) uses it"


def _locks(request):
    """Locks that no build holds, in the folder that the run compiles into."""
    folder = extensions_folder(os.environ, sys.prefix)
    return [lock for lock in sorted(glob.glob(os.path.join(folder, "*", "lock"))) if not _is_building(lock)]


def _is_building(lock):
    with contextlib.suppress(FileNotFoundError), open(os.path.join(os.path.dirname(lock), "build.flock")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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
    "locks": _locks,
}


def start_all_reduce(source: str, request: dict) -> None:
    """Start a rank of the all-reduce test for each slot of this host, and exit with the highest of their exit codes.

    Args:
        source: this program.
        request: ``address`` and ``port`` of the first host, ``world_size``, ``first_rank``, ``slots``, ``device``,
            ``seconds``, and ``environ``, which the launcher will set here.
    """
    os.environ.update(request["environ"])
    environ, ranks = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    for rank, slot in enumerate(request["slots"], request["first_rank"]):
        of_rank = {**request, "rank": rank, "slot": slot}
        command = [sys.executable, "-c", f"{source}\nrun_rank({of_rank!r})"]
        ranks.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL))
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def run_rank(request: dict) -> None:
    """Join the other ranks, reduce a megabyte and then more, and let rank 0 print the bandwidth. Needs torch."""
    signal.alarm(int(request["seconds"]) + 5)  # a rank that torch cannot stop

    import torch
    import torch.distributed as dist

    on_gpu = request["device"] == "cuda"
    if on_gpu:
        torch.accelerator.set_device_index(request["slot"])
    rank, world_size, address, port = (request[name] for name in ("rank", "world_size", "address", "port"))
    timeout = datetime.timedelta(seconds=request["seconds"])
    # Otherwise the store would listen on every interface.
    listener = _listen(os.environ.get("MASTER_LISTEN", address), port).detach() if rank == 0 else None
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listener)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    size = (256 if on_gpu else 16) * MIB
    tensor = torch.ones(size // 4, device="cuda" if on_gpu else "cpu")
    for _ in range(2):
        dist.all_reduce(tensor[: MIB // 4].fill_(1))
    if int(tensor[0]) != world_size:
        sys.exit(f"the sum over {world_size} ranks was {int(tensor[0])}")
    best = min(_seconds(dist, tensor.fill_(1), on_gpu) for _ in range(3))
    if rank == 0:
        others = 2 * (world_size - 1) / world_size
        print(ALL_REDUCE_MARK + json.dumps({"bytes_per_second": others * size / best, "bytes": size}), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(socket_address, family=family)


def _seconds(dist, tensor, on_gpu: bool) -> float:
    start = time.monotonic()
    dist.all_reduce(tensor)
    if on_gpu:
        tensor[0].item()
    return time.monotonic() - start
