"""The images' entry point, run for real: by an ordinary user, on each of two hosts.

The hosts are network namespaces in place of containers, see ``support/hosts.py``.
"""

import json
import os
import re
import shlex
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import INTERFACE, ROOT, Hosts, make_key, why_not
from support.programs import BIN, Finished, Programs

USER = 10_000
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
ENTRYPOINT = ["bash", str(ROOT / "docker" / "entrypoint.sh")]
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where that user may read and write, with a key."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_key(folder / "cluster_key")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
        (folder / "cluster_key").chmod(0o400)
        yield folder


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[Hosts]:
    place = folder / "hosts"
    place.mkdir()
    for path in (folder, place):
        path.chmod(0o755)
    command = ("bash", "-c", uncovering(ROOT, Path(sys.prefix), Path(sys.base_prefix)), "uncover")
    command += (*AS_USER, *environment(folder), *ENTRYPOINT)
    with Hosts(place, 2, service=command, user=USER) as hosts:
        for name in hosts.names:
            hosts.await_words(name, "Server listening")
        yield hosts


def uncovering(*folders: Path) -> str:
    """A script that makes folders of a private one's, such as /root, seen by everyone here, and nothing else."""
    private = {}
    for folder in folders:
        closed = [parent for parent in reversed(folder.parents) if not parent.stat().st_mode & stat.S_IXOTH]
        if closed:
            private[folder] = closed[0]
    kept = {folder: f"/run/kept-{number}" for number, folder in enumerate(private)}
    lines = ["set -e", "umask 022"]
    lines += [f"mkdir {kept[folder]}; mount --bind {shlex.quote(str(folder))} {kept[folder]}" for folder in private]
    lines += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(closed))}" for closed in set(private.values())]
    for folder in private:
        words = shlex.quote(str(folder))
        lines.append(f"mkdir -p {words}; mount --bind {kept[folder]} {words}")
    return "\n".join([*lines, 'exec "$@"'])


def environment(folder: Path, **others: str) -> list[str]:
    """What an image and ``docker run --env`` set, and nothing else."""
    words = {
        **{"PATH": f"{BIN}:/usr/bin:/bin", "SSH_KEY": folder / "cluster_key", "SSH_ADDRESS": "0.0.0.0"},
        **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE},
        **{"TORCH_EXTENSIONS_DIR": folder / "extensions", "DS_ODD": 'a  "b" $c', **others},
    }
    return ["env", "--ignore-environment", *(f"{name}={value}" for name, value in words.items() if value != "")]


@pytest.fixture
def inside(programs: Programs, hosts: Hosts, folder: Path) -> Callable[..., Finished]:
    """``inside(*command)`` on ``host-1``, as ``docker exec`` would run it."""

    def run(*command: str | Path, **environ: str) -> Finished:
        return programs.run(*hosts.on("host-1"), *AS_USER, *environment(folder, **environ), *command)

    return run


def test_containers_reach_each_other(inside) -> None:
    """By name, without a question, with the environment of the image; and so does the health check."""
    output = inside("ssh", "host-2", 'hostname; id -un; echo "$DS_ODD"; echo "$GLOO_SOCKET_IFNAME"').ok().output
    assert output.splitlines() == ["host-2", "trainer", 'a  "b" $c', INTERFACE]
    check = re.search(r"CMD (\[.*\])", (ROOT / "docker" / "Dockerfile").read_text())[1]
    inside(*json.loads(check.replace("/home/trainer", "~"))).ok()


def test_sshd_refuses_other_users_and_keys(inside, hosts, folder) -> None:
    """Not root, not with a password, not with another key; and a host with an unknown key is refused."""
    assert "Permission denied (publickey)" in inside("ssh", "root@host-2", "true").output
    assert "Permission denied (publickey)" in inside("ssh", "-o", "PubkeyAuthentication=no", "host-2", "true").output
    other = folder / "hosts" / "host-1" / "home" / "other_key"
    inside("ssh-keygen", "-q", "-N", "", "-f", other).ok()
    words = ("-F", "none", "-p", "2222", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-i", other)
    ignoring = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
    assert "Permission denied (publickey)" in inside("ssh", *words, *ignoring, "host-2", "true").output
    known = other.with_name("known")
    known.write_text(f"@cert-authority cluster {other.with_suffix('.pub').read_text()}")
    distrusted = inside("ssh", "-o", f"UserKnownHostsFile={known}", "host-2", "true")
    assert distrusted.returncode == 255 and "Host key verification failed" in distrusted.output


MEETS = """
import json, os, socket, sys
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    listener = socket.create_server(place)
    open(sys.argv[-1] + "/listens", "w")
    listener.accept()
else:
    while not os.path.exists(sys.argv[-1] + "/listens"):
        pass
    socket.create_connection(place, 60)
seen = [socket.gethostname(), os.environ["DS_ODD"], os.environ["WORLD_SIZE"]]
open(f"{sys.argv[-1]}/{rank}", "w").write(json.dumps(seen))
"""


def test_deepspeed_starts_ranks_over_containers(inside, hosts) -> None:
    """Over pdsh, with no environment forwarded by hand; training over pdsh is in test_multihost.py."""
    home = hosts.folder / "host-1" / "home"
    (home / "meets.py").write_text(MEETS)
    words = ("--hostfile", "docker/hostfile.compose", "--num_gpus", "1", home / "meets.py", home)
    inside("deepspeed", "--log_level", "warning", *words).ok()
    found = [json.loads((home / str(rank)).read_text()) for rank in range(2)]
    assert found == [[name, 'a  "b" $c', "2"] for name in ("host-1", "host-2")]


def test_secrets_are_readable_by_the_user_only(hosts) -> None:
    """And a container that starts once more keeps its host key; nothing of the shared key is written anywhere."""
    for path in (hosts.folder / "host-2" / "home" / ".ssh").iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        assert path.stat().st_uid == USER and mode == (0o644 if path.name == "sshd.pid" else 0o600), path
        assert (path.name == "host_key") == ("PRIVATE" in path.read_text())


def test_a_command_has_an_sshd_beside_it(inside, hosts) -> None:
    """If the container runs a command of its own; its host key is that of its first start."""
    key = hosts.folder / "host-1" / "home" / ".ssh" / "host_key"
    before = key.read_bytes()
    output = inside(*ENTRYPOINT, "ssh", "this-container", "echo $SSH_CONNECTION", SSH_PORT="2223").ok().output
    assert output.split()[-1] == "2223" and key.read_bytes() == before


@pytest.mark.parametrize(
    ("environ", "user", "words"),
    [
        ({"SSH_ADDRESS": ""}, USER, "set SSH_ADDRESS, this host's address in the cluster's network"),
        ({"SSH_KEY": "/etc/hostname"}, USER, "/etc/hostname is not a private key without a passphrase"),
        ({"SSH_ADDRESS": "10.1.1.1", "SSH_PORT": "2223"}, USER, "sshd does not start: Cannot bind any address."),
        ({}, 0, "sshd is not started as root"),
        ({}, USER + 1, f"there is no user {USER + 1}: build the image with --build-arg USER_ID={USER + 1}"),
    ],
)
def test_wrong_container_settings_are_refused(programs, hosts, folder, environ, user, words) -> None:
    become = ["setpriv", f"--reuid={user}", "--clear-groups"]
    refused = programs.run(*hosts.on("host-2"), *become, *environment(folder, **environ), *ENTRYPOINT, "true")
    assert refused.returncode == 2
    assert refused.output.splitlines()[-1].startswith(f"entrypoint.sh: error: {words}")


def test_command_runs_without_sshd_without_a_key(programs, hosts, folder) -> None:
    words = [*environment(folder, SSH_KEY="/run/secrets/ssh_key"), *ENTRYPOINT, "ps", "-C", "sshd", "--no-headers"]
    unshared = ["unshare", "--pid", "--fork", "--mount-proc"]
    assert programs.run(*unshared, *AS_USER, *words).output == ""
