"""Hosts that are this machine: an sshd each, of its own port, keys and environment, and an ssh that knows no others."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from support.ports import free_port

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
MISSING = None if SSHD and SSH else "needs sshd and ssh (apt-get install openssh-server)"
"""Why there can be no such hosts; None where there can."""


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

    def add(self, name: str, **environ: str) -> None:
        """Start a host; what is run there gets ``environ``."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        port, config = free_port(), self.folder / f"{name}.sshd_config"
        self._key(name)
        settings = [
            *("ListenAddress 127.0.0.1", f"Port {port}", "PidFile none", "UsePAM no", "StrictModes no"),
            *(f"HostKey {self.folder}/{name}", f"AuthorizedKeysFile {self.folder}/client.pub"),
            *("PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password"),
        ]
        if environ:
            settings.append("SetEnv " + " ".join(f'"{key}={value}"' for key, value in environ.items()))
        config.write_text("\n".join(settings) + "\n")
        with open(self.folder / f"{name}.log", "w") as log:
            self._servers.append(
                subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=log, stdin=subprocess.DEVNULL)
            )
        self.name(name, port)
        kind, key, *_ = (self.folder / f"{name}.pub").read_text().split()
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
        deadline = time.monotonic() + 20
        while True:
            tried = subprocess.run(
                [self.folder / "bin" / "ssh", "-o", "BatchMode=yes", name, "true"], capture_output=True, text=True
            )
            if tried.returncode == 0:
                return
            assert time.monotonic() < deadline, tried.stderr + (self.folder / f"{name}.log").read_text()
            time.sleep(0.1)
