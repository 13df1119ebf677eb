"""DeepSpeed's launchers on the hosts of ``hosts.py``, and their ranks, as forks of one process that has torch already.

The hosts' ``python`` is a script that asks that process for a launcher in the namespaces of its own host, and otherwise
becomes python. It ends with the launcher, and the launcher with it. Ranks are children of their launcher, as always.
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

LAUNCHER = "deepspeed.launcher.launch"
OWN_LAUNCHER = str(Path(__file__).parents[2] / "tools" / "_deepspeed_launcher.py")
LAUNCHER_NAME, RANK_NAME = "launcher", "rank"
"""As ps and pkill show the processes."""
CLIENT = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
if words[:3] != ["-u", "-m", "{LAUNCHER}"] and words[:2] != ["-u", "{OWN_LAUNCHER}"]:
    os.environ["PYTHONPATH"] = os.path.dirname(__file__)
    os.execv("{sys.executable}", ["{sys.executable}", *words])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(os.path.dirname(__file__) + "/warm")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: server.send(str(number).encode()))
asked = json.dumps([words[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [asked], [0, 1, 2])
code = int(server.recv(100) or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
SITE = """
import os, sys
sys.executable = os.path.dirname(__file__) + "/python"
"""
"""For ``sitecustomize.py``: what DeepSpeed starts on hosts."""


def start(folder: Path, log: Path) -> subprocess.Popen:
    """The process, with a ``python`` for hosts and its ``sitecustomize.py`` in ``folder``."""
    (folder / "python").write_text(CLIENT)
    (folder / "python").chmod(0o755)
    with open(folder / "sitecustomize.py", "a") as file:
        file.write(SITE)
    paths = [str(folder), *(str(Path(__file__).parents[up]) for up in (1, 2))]
    environ = {**os.environ, "PYTHONPATH": ":".join(paths), "ROOM": "x" * (1 << 16)}
    with open(log, "a") as output:
        command = [sys.executable, __file__, str(folder / "warm")]
        server = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=output)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n", log.read_text()
    return server


def _serve(path: str) -> NoReturn:
    import support.preload  # noqa: F401

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _attend(client)
        client.close()


def _attend(client: socket.socket) -> NoReturn:
    """Start the launcher that ``client`` asks for in its namespaces; end with it, or end it with the client."""
    asked, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
    pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    for space in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "pid", "mnt")]:
        assert ctypes.CDLL(None, use_errno=True).setns(space, 0) == 0, os.strerror(ctypes.get_errno())
    if (launcher := os.fork()) == 0:
        words, environ, folder = json.loads(asked)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.setsid()
        os.chdir(folder)
        subprocess.Popen = _Forked  # type: ignore[misc]
        if words[0] == "-m":
            words = words[1:]
            run = partial(runpy.run_module, LAUNCHER, run_name="__main__")
        else:
            run = partial(runpy.run_path, OWN_LAUNCHER, run_name="__main__")
        _be(LAUNCHER_NAME, run, words, environ)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(launcher)
    while ended not in (ready := select.select([client, ended], [], [])[0]):
        number = client.recv(100) if client in ready else b""
        os.kill(launcher, int(number or signal.SIGKILL))
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    try:
        client.send(str(code).encode())
    finally:
        os._exit(0)


class _Forked(subprocess.Popen):
    """Of a rank: it continues in the fork, without another python."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        script, *_ = words = command[2:]

        def run() -> None:
            subprocess.Popen = _Forked.__base__  # type: ignore[misc]
            runpy.run_path(script, run_name="__main__")

        super().__init__(command, env=env, preexec_fn=partial(_be, RANK_NAME, run, words, env))


def _be(name: str, run: Callable[[], Any], words: list[str], environ: dict[str, str]) -> NoReturn:
    """Become a program: what /proc says of the process, too."""
    os.closerange(3, 4096)  # a parent waits until its fork has closed a pipe
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which subprocess has restored, and python ignores
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, size = int(fields[47]), int(fields[48]) - int(fields[47])
    shown = b"\0".join(f"{key}={value}".encode() for key, value in environ.items())
    ctypes.memmove(start, shown.ljust(size, b"\0"), size)
    Path("/proc/self/comm").write_text(name)
    sys.argv, code = words, 0
    sys.path[0] = str(Path(words[0]).resolve().parent)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
