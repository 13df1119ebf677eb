"""Hosts that are this machine: an sshd each, of its own port, keys and environment, and an ssh that knows no others."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron.launch.environment import free_port

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
MISSING = None if SSHD and SSH else "needs sshd and ssh (apt-get install openssh-server)"
"""Why there can be no such hosts; None where there can."""


def mounting_refused() -> str | None:
    """Why no host can have files of its own; None where one can."""
    command = ["unshare", "--mount", "mount", "--bind", "/", "/"]
    if shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0:
        return None
    return "needs unshare and the right to mount (root, or CAP_SYS_ADMIN in a container)"


class LocalHosts:
    """Starts sshds under ``folder``, reads and writes no other ssh's files, and ends them with ``close``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._servers: list[subprocess.Popen] = []
        self._key("client")
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        self.path = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
        """PATH with that ssh in front."""
        (folder / "ssh_config").write_text("")

    def add(
        self,
        name: str,
        environ: Mapping[str, str] | None = None,
        mounts: Mapping[Path, Path] | None = None,
        read_only: Iterable[Path] = (),
        trusted: bool = True,
    ) -> None:
        """Start a host.

        Args:
            name: as ssh knows it.
            environ: what programs there find in their environment.
            mounts: what they find at each of these places, in place of what is there.
            read_only: folders that they cannot write in.
            trusted: whether ssh knows the host's key; otherwise it knows another.
        """
        environ = {"TORCH_EXTENSIONS_DIR": str(self.folder / f"{name}.extensions"), **(environ or {})}
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        port, config = free_port(), self.folder / f"{name}.sshd_config"
        self._key(name)
        settings = [
            *("ListenAddress 127.0.0.1", f"Port {port}", "PidFile none", "UsePAM no", "StrictModes no"),
            *(f"HostKey {self.folder}/{name}", f"AuthorizedKeysFile {self.folder}/client.pub"),
            *("PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password"),
        ]
        settings.append("SetEnv " + " ".join(f'"{key}={value}"' for key, value in environ.items()))
        config.write_text("\n".join(settings) + "\n")
        with open(self.folder / f"{name}.log", "w") as log:
            command = [*_with_mounts(mounts or {}, read_only), SSHD, "-D", "-e", "-f", config]
            self._servers.append(subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL))
        self.name(name, port)
        kind, key, *_ = (self.folder / f"{name if trusted else 'client'}.pub").read_text().split()
        with open(self.folder / "known_hosts", "a") as file:
            file.write(f"[127.0.0.1]:{port} {kind} {key}\n")
        self._await(name)

    def name(self, name: str, port: int, key: str = "client") -> None:
        """Let ssh find ``name`` at a port of this machine, whatever is there, and knock with that key."""
        settings = {
            "HostName": "127.0.0.1",
            "Port": port,
            "IdentityFile": self.folder / key,
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": self.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
        }
        with open(self.folder / "ssh_config", "a") as file:
            file.write(f"Host {name}\n" + "".join(f"  {key} {value}\n" for key, value in settings.items()))

    def lock(self, name: str, key: str) -> None:
        """Let ssh connect to ``name`` with an unknown key."""
        config = self.folder / "ssh_config"
        before, host, after = config.read_text().partition(f"Host {name}\n")
        config.write_text(before + host + after.replace(f"{self.folder}/client", f"{self.folder}/{key}", 1))

    def new_key(self, name: str) -> None:
        """A key that opens nothing."""
        self._key(name)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait()

    def _key(self, name: str) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)

    def _await(self, name: str) -> None:
        log, deadline = self.folder / f"{name}.log", time.monotonic() + 120
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline and self._servers[-1].poll() is None, log.read_text()
            time.sleep(0.05)


def _with_mounts(mounts: Mapping[Path, Path], read_only: Iterable[Path]) -> list[str]:
    """The words in front of a command that let it, and what it starts, see these files and no others."""
    steps = [shlex.join(["mount", "--rbind", str(there), str(place)]) for place, there in mounts.items()]
    for place in map(str, read_only):
        steps += [shlex.join(["mount", "--bind", place, place]), shlex.join(["mount", "-o", "remount,bind,ro", place])]
    return ["unshare", "--mount", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh"] if steps else []
