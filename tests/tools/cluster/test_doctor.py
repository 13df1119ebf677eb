"""tools/doctor.py on hosts with one problem each: it is reported, on its host alone, with a fix."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.command_lines import latest
from support.local_hosts import LocalHosts, mounting_refused
from support.programs import TINY_MODEL, Programs

from megatron.launch.environment import free_port
from megatron.tools.cluster.doctor import table
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.probe_hosts import CheckResult, _run_probe

ROOT = Path(__file__).resolve().parents[3]
SENT = "DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=lo\n"
TIME_LIMIT = 240
"""Seconds, on a busy machine. An idle one takes ten: the silent host five, the imports the rest."""

NO_MOUNTS = mounting_refused()

needs_mounts = pytest.mark.skipif(NO_MOUNTS is not None, reason=str(NO_MOUNTS))
Ask = Callable[..., tuple[int, dict]]


@pytest.fixture
def folder(tmp_path: Path, programs: Programs) -> Path:
    """A folder to start in, with the data set and a folder for checkpoints."""
    programs.data_arguments  # noqa: B018, which makes them
    shutil.copytree(programs.folder, tmp_path / "data")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".deepspeed_env").write_text(SENT)
    return tmp_path


@pytest.fixture
def ask(local_hosts: LocalHosts, folder: Path) -> Ask:
    """``ask("host-a host-b", *words)``: exit code of the doctor, and the red lines: {(host, check): (found, fix)}."""

    def run(hosts: str, *words: str, slots: int = 1, **environ: str) -> tuple[int, dict]:
        code, output = start(local_hosts, folder, hosts, "--json", *words, slots=slots, **environ)
        report = json.loads(output)
        bad = {
            (host, line["check"]): (line["found"], line["fix"])
            for host, lines in report["hosts"].items()
            for line in lines
            if not line["ok"]
        }
        assert report["ok"] == (code == 0) == (not bad)
        return code, bad

    return run


def start(
    local_hosts: LocalHosts, folder: Path, hosts: str, *words: str, slots: int = 1, **environ: str
) -> tuple[int, str]:
    (folder / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts.split()))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--hostfile", "hostfile", *words],
        cwd=folder,
        env={"PATH": local_hosts.path, "HOME": str(folder), "DS_ACCELERATOR": "cpu", **environ},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout or ended.stderr


def training(folder: Path) -> list[str]:
    """The arguments of a run that reads and writes in ``folder``."""
    return [
        *TINY_MODEL, *"--batch-size 2 --train-iters 4 --split 8,1,1 --tokenizer-type WhitespaceTokenizer".split(),
        "--data-path", "data/tiny_text_document", "--vocab-file", "data/vocab.json",
        "--save", "checkpoints", "--load", str(folder / "checkpoints"),
    ]  # fmt: skip


def test_healthy_hosts_are_ready_with_their_bandwidth(local_hosts: LocalHosts, folder: Path) -> None:
    place = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, printed = start(local_hosts, folder, "host-a host-b", *place, "pretrain_gpt2.py", *training(folder))
    assert code == 0, printed
    assert "GB/s" in printed and printed.endswith("2 hosts, 2 ranks: ready\n") and "\033" not in printed
    checks = {line.split()[1] for line in printed.splitlines() if line.startswith("  ok ")}
    assert checks == {
        "ssh", "python", "versions", "project", "arguments", "devices", "data", "folders", "disk", "port", "interface",
        "environment", "all-reduce",
    }  # fmt: skip
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    before.pop(folder / "hostfile", None), after.pop(folder / "hostfile")
    assert after == before, "it writes nothing"


def test_a_host_that_is_silent_and_one_that_is_down(local_hosts: LocalHosts, folder: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        local_hosts.name("host-silent", silent.getsockname()[1])
        local_hosts.name("host-down", free_port())
        code, printed = start(local_hosts, folder, "host-a host-silent host-down", "--json")
    hosts = json.loads(printed)["hosts"]
    assert code == 6
    assert all(line["ok"] for line in hosts["host-a"])
    for host, words, fix in (("host-silent", "timed out", "ping"), ("host-down", "Connection refused", "start ssh")):
        last = hosts[host][-1]
        assert last["check"] == "ssh" and not last["ok"] and words in last["found"] and fix in last["fix"]


def _hostfile(folder: Path, hosts: str) -> Path:
    (folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts.split()))
    return folder


def test_a_host_without_a_name_another_key_of_ours_another_key_of_its_own(local_hosts: LocalHosts, ask: Ask) -> None:
    local_hosts.new_key("stranger")
    local_hosts.add("host-locked")
    local_hosts.lock("host-locked", "stranger")
    local_hosts.add("host-changed", trusted=False)
    code, bad = ask("no-such-host.invalid host-locked host-changed host-a", "--quick")
    assert code == 6 and {host for host, _ in bad} == {"no-such-host.invalid", "host-locked", "host-changed"}
    assert "/etc/hosts" in bad["no-such-host.invalid", "ssh"][1]
    found, fix = bad["host-locked", "ssh"]
    assert "Permission denied" in found and fix.endswith("ssh-copy-id host-locked")
    found, fix = bad["host-changed", "ssh"]
    assert "verification failed" in found and "host-changed" in fix


@needs_mounts
def test_data_that_is_missing_or_another_and_folders_of_its_own(
    local_hosts: LocalHosts, ask: Ask, folder: Path
) -> None:
    empty, other = folder / "empty", folder / "other"
    empty.mkdir()
    shutil.copytree(folder / "data", other)
    tokens = bytearray((other / "tiny_text_document.bin").read_bytes())
    tokens[5] ^= 1
    (other / "tiny_text_document.bin").write_bytes(tokens)
    (other / "vocab.json").write_text("{}")
    local_hosts.add("host-empty", mounts={folder / "data": empty})
    local_hosts.add("host-tokens", mounts={folder / "data": other})
    local_hosts.add("host-local", mounts={folder / "checkpoints": empty})
    local_hosts.add("host-read", read_only=[folder / "checkpoints"])
    _, bad = ask("host-a", "--quick", *training(folder), "--vocab-file", "absent")
    assert bad["host-a", "arguments"][0] == f"--vocab-file {folder}/absent: No such file or directory", "on any host"
    code, bad = ask("host-a host-empty host-tokens host-local host-read", "--quick", *training(folder))
    assert code == 6
    kinds = {"host-empty": {"arguments", "data"}, "host-tokens": {"arguments", "data"}}
    kinds |= {"host-local": {"folders"}, "host-read": {"folders"}}
    assert {host: {check for there, check in bad if there == host} for host in kinds} == kinds
    assert {host for host, _ in bad} == set(kinds)
    prefix = f"{folder}/data/tiny_text_document"
    found, fix = bad["host-empty", "data"]
    assert found == f"{prefix}: No such file or directory"
    assert fix == f"rsync -a {prefix}.bin {prefix}.idx host-empty:{folder}/data/"
    assert "differs from this host" in bad["host-tokens", "data"][0]
    assert bad["host-tokens", "arguments"][0] == f"--vocab-file {folder}/data/vocab.json: differs from here"
    assert "not shared" in bad["host-local", "folders"][0] and "findmnt" in bad["host-local", "folders"][1]
    assert "no permission to write" in bad["host-read", "folders"][0] and "chmod" in bad["host-read", "folders"][1]
    os.truncate(f"{prefix}.bin", 500)
    _, bad = ask("host-a", "--quick", *training(folder))
    assert f"{prefix}.bin is truncated" in bad["host-a", "data"][0], "on every host"


@needs_mounts
def test_a_project_that_is_missing_or_another_and_another_deepspeed(
    local_hosts: LocalHosts, ask: Ask, tmp_path: Path
) -> None:
    package = tmp_path / "packages" / "deepspeed-0.1.2.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1.2\n")
    local_hosts.add("host-other", {"PYTHONPATH": str(package.parent)})
    other = tmp_path / "project"
    shutil.copytree(ROOT / "megatron", other / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt2.py", other)
    (other / "megatron" / "engine.py").write_text("# another\n")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    local_hosts.add("host-sources", mounts=_python_in(other) | {ROOT: other})
    local_hosts.add("host-bare", mounts=_python_in(nothing) | {ROOT: nothing})
    code, bad = ask("host-a host-sources host-bare host-other", "--quick")
    assert code == 6
    assert set(bad) == {("host-sources", "project"), ("host-bare", "project"), ("host-other", "versions")}
    found, fix = bad["host-other", "versions"]
    assert found.startswith("deepspeed 0.1.2, here 0.")
    assert "ssh host-other " in fix and "pip install deepspeed==" in fix
    assert bad["host-sources", "project"][0].startswith("other sources")
    assert bad["host-sources", "project"][1].startswith("rsync ") and "mkdir" in bad["host-bare", "project"][1]


def _python_in(project: Path) -> dict[Path, Path]:
    """What lets a host with another ``project`` find its Python, which may lie in the project's own folder."""
    python = Path(sys.prefix)
    if not python.is_relative_to(ROOT):
        return {}
    place = project / python.relative_to(ROOT)
    place.mkdir(parents=True)
    return {place: python}


def test_a_port_that_is_taken_an_interface_that_is_missing_and_what_is_not_sent(ask: Ask, folder: Path) -> None:
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=nope0\n")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, bad = ask("host-a host-b", "--quick", "--master_port", port)
    found, fix = bad.pop(("host-a", "port"))
    assert code == 6 and found.startswith(f"{port}: ") and "--master_port" in fix
    assert set(bad) == {(host, check) for host in ("host-a", "host-b") for check in ("interface", "environment")}
    assert bad["host-a", "interface"][0].startswith("GLOO_SOCKET_IFNAME=nope0: no nope0, only ")
    found, fix = bad["host-a", "environment"]
    assert found.startswith("DS_ACCELERATOR: ") and fix.endswith(f" >> {folder}/.deepspeed_env")
    subprocess.run(fix, shell=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True)
    assert (folder / ".deepspeed_env").read_text() == "GLOO_SOCKET_IFNAME=nope0\nDS_ACCELERATOR=cpu\n"


def test_more_slots_than_devices(ask: Ask, folder: Path) -> None:
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cuda\n")
    code, bad = ask("host-a", "--quick", slots=99, DS_ACCELERATOR="cuda")
    ((key, (found, fix)),) = bad.items()
    assert code == 6 and key == ("host-a", "devices") and "ask for slot 98" in found and "slots=" in fix


def test_more_ranks_than_the_memory_holds(ask: Ask, folder: Path) -> None:
    code, bad = ask("host-a", "--quick", slots=999_999)
    ((key, (found, fix)),) = bad.items()
    assert code == 6 and key == ("host-a", "devices") and found.startswith("999,999 ranks take") and "slots=" in fix


def test_failed_all_reduce_is_reported(local_hosts: LocalHosts, folder: Path) -> None:
    """The ranks are sent to an unused address."""
    place = ["--master_addr", "198.51.100.1", "--master_port", str(free_port()), "--time-limit", "5"]
    code, printed = start(local_hosts, folder, "host-a", *place)
    assert code == 6 and "BAD  all-reduce   host-a: rank 0: " in printed, printed


def without_sshd(folder: Path, *words: str, around: Sequence[str] = (), **environ: str) -> tuple[int, str]:
    """Exit code and output of the doctor on a machine whose ssh is answered by no host."""
    (folder / "ssh").write_text("#!/bin/sh\necho 'ssh: connect to host: Connection refused' >&2; exit 255\n")
    (folder / "ssh").chmod(0o755)
    tool = [*around, sys.executable, str(ROOT / "tools" / "doctor.py"), *words]
    environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(tool, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def test_among_several_hosts_this_one_needs_ssh_and_is_checked_nevertheless(folder: Path) -> None:
    _hostfile(folder, "localhost no-such-host.invalid")
    (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=nope0\n")
    code, printed = without_sshd(folder, "--quick", "--hostfile", "hostfile")
    assert code == 6 and "  BAD  ssh          ssh: connect to host: Connection refused" in printed
    assert "       fix: ip -br address  # then set" in printed, "a command for this host, without ssh"
    assert printed.endswith("2 hosts, 2 ranks: 3 checks failed\n"), "the interface and the other's name besides"


def test_this_host_is_checked_without_ssh(folder: Path) -> None:
    """Every check but ssh itself is made, and a run on this host alone is ready."""
    (folder / "hostfile").write_text("localhost slots=1\n")
    words = ["--hostfile", "hostfile", "--master_port", str(free_port()), "pretrain_gpt2.py", *training(folder)]
    code, printed = without_sshd(folder, *words)
    assert code == 0, printed
    assert (
        "  ok   ssh          not used: ssh: connect to host: Connection refused; tools/launch.py needs none" in printed
    )
    assert {"data", "port", "folders", "all-reduce"} <= {line.split()[1] for line in printed.splitlines()[1:-1]}
    code, printed = without_sshd(folder, "--quick", "--num_gpus", "2")
    assert code == 0 and "not used: there is no hostfile" in printed and printed.endswith("1 host, 2 ranks: ready\n")


def test_the_ranks_of_a_single_host_inherit_the_interface(folder: Path) -> None:
    (folder / ".deepspeed_env").unlink()
    code, printed = without_sshd(folder, "--quick", "--master_port", str(free_port()), GLOO_SOCKET_IFNAME="nope0")
    assert code == 6 and "BAD  interface    GLOO_SOCKET_IFNAME=nope0: no nope0, only " in printed, printed
    assert "address  # then set GLOO_SOCKET_IFNAME\n" in printed


@needs_mounts
def test_a_host_without_a_loopback_is_named(folder: Path) -> None:
    code, printed = without_sshd(folder, "--num_gpus", "2", "--master_port", str(free_port()), around=["unshare", "-n"])
    assert code == 6 and "BAD  interface    127.0.0.1 cannot be reached " in printed, printed
    assert "fix: ip link set lo up\n" in printed and printed.endswith("2 ranks: 1 check failed\n"), "before the ranks"


def test_the_probe_needs_nothing_but_python(folder: Path) -> None:
    """A host may lack all packages, numpy too, which is then reported."""
    data = [str(path.with_suffix("")) for path in (folder / "data").glob("*.idx")]
    request = {"project": "", "files": {}, "data": data, "folders": {}, "port": None, "environ": {}, "leftovers": None}
    report = _run_probe(Host("bare", ()), [sys.executable, "-S", "-"], request, seconds=60)
    assert report.fact("software")["torch"] is None
    assert data and all("value" in found for found in report.fact("data").values())


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        ("a slots=1\nb slots=x\n", [], "hostfile:2:3: "),
        ("a slots=1\n", ["--num-layers", "4"], "--hidden-size"),
    ],
)
def test_wrong_usage_contacts_no_host(
    tool, tmp_path: Path, monkeypatch, text: str, words: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # where no ssh is
    (tmp_path / "hostfile").write_text(text)
    ended = tool("doctor", *latest(["--hostfile", "hostfile", *words]))
    assert ended.returncode == 2 and ended.stdout == "" and reason in ended.stderr
    assert all(line.startswith("doctor.py: error: ") for line in ended.stderr.splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["hostfile"]


def test_equal_findings_of_many_hosts_are_one() -> None:
    def checks(number: int) -> dict[str, list[CheckResult]]:
        if number % 100 == 7:
            return {"ssh": [CheckResult(False, f"host-{number}: no answer", f"ping host-{number}")]}
        return {"ssh": [CheckResult(True, "answers")], "disk": [CheckResult(True, f"{number} GiB free")]}

    lines = table({f"host-{number}": checks(number) for number in range(2048)}, color=False).splitlines()
    assert len(lines) == 4
    assert "2,027 hosts" in lines[0] and "2,027 hosts" in lines[3]
    assert "21 hosts, host-7, host-107" in lines[1] and "and 5 more" in lines[1] and "ping host-7 " in lines[2]
