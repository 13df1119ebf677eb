"""Several hosts on one machine: what Linux calls namespaces, joined by a bridge, with an sshd in each.

A host has its own name, network, processes, /etc/hosts, /etc/ssh, /run and /dev/shm; files it shares with the others,
but for temporary ones: Open MPI names them by host and process, whose numbers are the same in other namespaces.
Nothing of it has a name outside, and all of it goes with its first process, so nothing is left behind.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERFACE = "eth0"
TEMPORARY = "/run/tmp"
NEEDED = ("ip", "nsenter", "pdsh", "setpriv", "ssh", "ssh-keygen", "unshare", "/usr/sbin/sshd")

PACKAGES = "iproute2 openssh-client openssh-server pdsh util-linux"

HOST = f"""
set -e
folder=$1 name=$2
shift 2
hostname "$name"
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf
[ ! -e "$folder/$name/ssh" ] || mount --bind "$folder/$name/ssh" /etc/ssh
[ ! -e "$folder/$name/passwd" ] || mount --bind "$folder/$name/passwd" /etc/passwd
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc  # what it starts would leave locks when it is killed
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
mkdir /run/sshd
mkdir -m 1777 {TEMPORARY}
echo made
read -r joined
ip link set lo up
"$@" </dev/null &
wait $!
"""
"""The start of a host, followed by its command. All processes end with this shell.

The command is not run in place of it: one that becomes another user would lose PR_SET_PDEATHSIG.
"""

SSHD_CONFIG = f"""
SetEnv TMPDIR={TEMPORARY}
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
"""

SSH_CONFIG = """
Host *
    IdentityFile /etc/ssh/key
    IdentitiesOnly yes
    GlobalKnownHostsFile /etc/ssh/known_hosts
    UserKnownHostsFile /dev/null
    BatchMode yes
    ConnectTimeout 5
"""


def why_not() -> str | None:
    """Why this machine cannot be several hosts; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "several hosts need Linux and root, to make network namespaces"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"several hosts need {', '.join(missing)}: apt-get install {PACKAGES}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


class Hosts:
    """``host-1``, ``host-2``, ... at 10.9.0.1, ..., as files in ``folder`` describe them; use as a context.

    Args:
        folder: for keys, names and logs; empty.
        count: how many.
        service: what each host starts instead of its own sshd.
        user: the number of a user whom each host knows as ``trainer``, with a home in ``FOLDER/HOST/home``.
    """

    def __init__(self, folder: Path, count: int, service: tuple[str, ...] = (), user: int = 0):
        self.folder, self.service, self.user = folder, service, user
        self.names = [f"host-{number}" for number in range(1, count + 1)]
        addresses = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        # No name server: what is not in the file is unknown at once.
        (folder / "resolv.conf").write_text("")
        self._processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Hosts":
        try:
            self._start("switch", ["unshare", "--net"], ["sleep", "infinity"])
            self._on_switch("ip", "link", "add", "bridge", "type", "bridge")
            self._on_switch("ip", "link", "set", "bridge", "up")
            if not self.service:
                self._make_keys()
            for name in self.names:
                self._start_host(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    @staticmethod
    def address(name: str) -> str:
        """Where the host is reached."""
        return f"10.9.0.{name.rpartition('-')[2]}"

    def on(self, name: str) -> list[str]:
        """What to put before a command that shall run on the host, in the project's root folder."""
        process = self._processes[name].pid
        enter = ["nsenter", "--target", str(process), "--net", "--uts", "--mount"]
        return [*enter, f"--pid=/proc/{process}/ns/pid_for_children", "env", f"--chdir={ROOT}", f"TMPDIR={TEMPORARY}"]

    def hostfile(self, slots: int, count: int) -> Path:
        """A file with so many slots for each of the first ``count`` hosts."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{name} slots={slots}\n" for name in self.names[:count]))
        return path

    def said(self, name: str) -> str:
        """What the host's service has logged."""
        return (self.folder / name / "log").read_text()

    def await_words(self, name: str, words: str) -> None:
        """Wait until the host's service has logged ``words``."""
        deadline = time.monotonic() + 120
        while words not in self.said(name):
            assert self._processes[name].poll() is None and time.monotonic() < deadline, self.said(name)
            time.sleep(0.01)

    def await_end(self, name: str, word: str) -> None:
        """Wait until no process of the host has ``word`` on its command line."""
        deadline = time.monotonic() + 240
        command = [*self.on(name), "ps", "-ww", "-eo", "args"]  # whole lines, whatever COLUMNS says
        while word in (said := subprocess.run(command, capture_output=True, text=True, check=True).stdout):
            assert time.monotonic() < deadline, said
            time.sleep(0.5)

    def kill(self, name: str) -> None:
        """End the host with all that runs there; connections of other hosts are closed, as by a reboot."""
        self._processes[name].kill()
        self._processes[name].wait()

    def start_again(self, name: str) -> None:
        """Start a host that was killed; Linux may not have removed its network yet."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._on_switch("ip", "link", "delete", f"port-{name}")
        self._start_host(name)

    def cut(self, name: str, state: str = "down") -> None:
        """Take its link away, or, with ``up``, give it back."""
        self._on_switch("ip", "link", "set", f"port-{name}", state)

    def _start_host(self, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        if self.user:
            self._make_user(self.folder / name)
        command = list(self.service)
        if not command:
            self._configure_ssh(self.folder / name / "ssh")
            command = ["/usr/sbin/sshd", "-D", "-e"]
        namespaces = "--net --uts --pid --fork --kill-child --mount-proc".split()
        process = self._start(name, ["unshare", *namespaces], command)
        port = f"port-{name}"
        peer = ["peer", "name", INTERFACE, "netns", str(process.pid)]
        self._on_switch("ip", "link", "add", port, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", port, "master", "bridge", "up")
        for words in (f"addr add {self.address(name)}/24 dev {INTERFACE}", f"link set {INTERFACE} up"):
            subprocess.run([*self.on(name), "ip", *words.split()], check=True)
        process.stdin.write("joined\n")
        process.stdin.close()
        if not self.service:
            self.await_words(name, "Server listening")

    def _start(self, name: str, unshare: list[str], command: list[str]) -> subprocess.Popen:
        """A process in namespaces of its own, which are there when this returns."""
        (self.folder / name).mkdir(exist_ok=True)
        script = ["bash", "-c", HOST, "host", str(self.folder), name, *command]
        if name == "switch":
            script = ["bash", "-c", 'echo made; exec "$@" </dev/null', "switch", *command]
        with open(self.folder / name / "log", "w") as log:
            process = subprocess.Popen(
                # The process that is killed when this one exits ends the namespace, too.
                ["setpriv", "--pdeathsig", "KILL", *unshare, *script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes[name] = process
        assert process.stdout.readline() == "made\n", self.said(name)
        return process

    def _on_switch(self, *command: str) -> None:
        process = self._processes["switch"].pid
        subprocess.run(["nsenter", "--target", str(process), "--net", *command], check=True)

    def _make_user(self, place: Path) -> None:
        home = place / "home"
        home.mkdir()
        os.chown(home, self.user, self.user)
        known = Path("/etc/passwd").read_text()
        (place / "passwd").write_text(f"trainer:x:{self.user}:{self.user}::{home}:/bin/bash\n{known}")

    def _make_keys(self) -> None:
        """The user's key, the same on all hosts, and each host's own."""
        make_key(self.folder / "key")
        for name in self.names:
            (self.folder / name / "ssh").mkdir(parents=True)
            make_key(self.folder / name / "ssh" / "host_key")

    def _configure_ssh(self, place: Path) -> None:
        """What stands in the host's /etc/ssh."""
        for file in ("key", "key.pub"):
            shutil.copy(self.folder / file, place)
        known = [f"{name} {(self.folder / name / 'ssh' / 'host_key.pub').read_text()}" for name in self.names]
        (place / "known_hosts").write_text("".join(known))
        (place / "ssh_config").write_text(SSH_CONFIG)
        (place / "sshd_config").write_text(SSHD_CONFIG)


def make_key(path: Path) -> None:
    """A key pair for ssh, without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
