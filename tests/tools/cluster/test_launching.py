"""tools/launch.py: hosts, folders and arguments reach other hosts as they are, or are refused; nothing in them runs."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.command_lines import SMALL
from support.local_hosts import LocalHosts
from support.programs import Programs
from support.refusals import ROOT

from megatron.common.errors import ConfigError
from megatron.launch.environment import free_port
from megatron.tools.cluster import launching
from megatron.tools.cluster.hostfile import Host
from megatron.tools.cluster.launch_flags import chosen_hosts, read_launch
from megatron.tools.cluster.launching import PDSH_FAN_OUT, check_arguments, launcher_arguments
from megatron.tools.cluster.remote import ssh_command

HOSTILE = [
    "a;touch marker", "a;touch${IFS}marker", "$(touch marker)", "$(touch${IFS}marker)", "`touch marker`",
    "`touch${IFS}marker`", "a b", "it's", 'a "b" c', '"', "'", "\\", "a \\ b", "a \\\" b", "two\nlines", "two \nlines",
    "a|b&c>d<e", "*", "~", "$HOME", "a $HOME b", "#", "%h", "a %n", "100%", "", "-x", "--flag=a b", "!!", "{a,b}",
]  # fmt: skip


CPU = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hostfile"
    file.write_text("host-a slots=1\nhost-b slots=1\n")
    return file


def arguments(hostfile: Path | None, *words: str, environ: dict[str, str] = CPU) -> list[str]:
    read = ["--hostfile", str(hostfile)] if hostfile else []
    return launcher_arguments(read_launch([*read, *words, "x.py"]), environ)


def refusals(hostfile: Path, *words: str, environ: dict[str, str] = CPU) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        arguments(hostfile, *words, environ=environ)
    return caught.value.messages


def test_ssh_never_prompts_and_hosts_are_not_options() -> None:
    command = ssh_command("worker-1", ["ls", "a b; touch marker"], port=2222)
    assert command[-2:] == ["worker-1", "ls 'a b; touch marker'"] and command[-3] == "--"
    assert "BatchMode=yes" in command and "ConnectTimeout=5" in command and command[command.index("-p") + 1] == "2222"
    assert not any("StrictHostKeyChecking" in word for word in command)


def test_files_of_the_working_folder_are_not_imported(programs: Programs, tmp_path: Path) -> None:
    """With python -m, as DeepSpeed starts its launcher, they would take the place of libraries."""
    (tmp_path / "work").mkdir()
    for name in ("torch", "psutil", "random", "uuid"):
        (tmp_path / "work" / f"{name}.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "rank.py").write_text("raise SystemExit(7)\n")
    command = [sys.executable, programs.root / "tools/launch.py", "--num_gpus", "1", "../rank.py"]
    ended = subprocess.run(command, cwd=tmp_path / "work", env={**os.environ, "DS_ACCELERATOR": "cpu"}, timeout=120)
    assert ended.returncode == 7


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_alone_needs_no_ssh(hostfile: Path, name: str) -> None:
    """DeepSpeed would ask it for its name and its address over ssh, though it starts the ranks itself."""
    hostfile.write_text(f"{name} slots=2\n")
    assert {"--no_ssh_check", "--master_addr=127.0.0.1"} <= set(arguments(hostfile))
    assert "--master_addr=10.0.0.1" in arguments(hostfile, "--master_addr", "10.0.0.1")
    assert not {"--no_ssh_check", "--master_addr=127.0.0.1"} & set(arguments(hostfile, "--force_multi"))
    hostfile.write_text("worker-1 slots=2\n")
    assert not {"--no_ssh_check", "--master_addr=127.0.0.1"} & set(arguments(hostfile)), "which may be another"


def test_the_first_host_is_not_asked_for_its_address(hostfile: Path) -> None:
    """With Slurm, and where the same command is started on each host, there may be no ssh."""
    for words in (["--launcher", "slurm"], ["--no_ssh", "--node_rank", "1"]):
        assert {"--no_ssh_check", "--master_addr=host-a"} <= set(arguments(hostfile, *words))
        assert "--master_addr=10.0.0.1" in arguments(hostfile, *words, "--master_addr", "10.0.0.1")


def test_flags_reach_deepspeed(hostfile: Path) -> None:
    flags = ["--no_ssh", "--node_rank", "0", "--num_nodes", "2", "--num_gpus", "1", "--master_addr", "10.0.0.1"]
    words = arguments(hostfile, *flags)
    assert words[-1] == "x.py" and set(words[:-1]) == {
        f"--hostfile={hostfile}", "--no_ssh", "--node_rank=0", "--num_nodes=2", "--num_gpus=1",
        "--master_addr=10.0.0.1", "--master_port=29500", "--launcher=pdsh", "--log_level=critical",
    }  # fmt: skip


def test_numbers_of_hosts_and_processes(hostfile: Path) -> None:
    read = ["--hostfile", str(hostfile)]
    assert chosen_hosts(read_launch([*read, "--num_nodes", "1", "x.py"])) == [Host("host-a", (0,))]
    assert chosen_hosts(read_launch([*read, "--num_gpus", "3", "x.py"]))[1] == Host("host-b", (0, 1, 2))
    assert "--num_nodes 9" in refusals(hostfile, "--num_nodes", "9")[0]
    assert "--num_nodes and --num_gpus are not supported" in refusals(hostfile, "--num_gpus", "1", "-i", "host-a")[0]


def test_arguments_are_unchanged_on_one_host(hostfile: Path) -> None:
    words = ["--hostfile", str(hostfile), "-i", "host-a", "--master_port", "29501", "x y.py", *HOSTILE]
    command = launcher_arguments(read_launch(words), {**CPU, "UCX_X": "$x"})
    assert command[-len(HOSTILE) - 1 :] == ["x y.py", *HOSTILE]
    assert "--include=host-a" in command


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (apt-get install pdsh)")
def test_arguments_and_variables_reach_every_host_as_they_are(
    programs: Programs, local_hosts: LocalHosts, warm_python: dict[str, str], hostfile: Path, tmp_path: Path
) -> None:
    """Through the real deepspeed, pdsh, ssh and a login shell each; CUDA's and torch's variables are sent, too."""
    script = tmp_path / "a script; touch marker; 100%h.py"
    script.write_text(
        "import json, os, sys\n"
        f"with open({str(tmp_path)!r} + '/seen-' + os.environ['RANK'], 'w') as file:\n"
        "    json.dump([sys.argv[2:], {**os.environ}], file)\n"
    )
    words = ["--hostfile", hostfile, "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    secret = {"UCX_TOKEN": "hunter2"}  # which DeepSpeed sends
    sent = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    sent |= {"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_FR_BUFFER_SIZE": "2000", **secret}
    ended = programs.python(
        "tools/launch.py", *words, script, *HOSTILE, PATH=local_hosts.path, **sent, **warm_python
    ).ok()
    assert "hunter2" not in ended.output
    for rank in (0, 1):
        arguments, environ = json.loads((tmp_path / f"seen-{rank}").read_text())
        assert arguments == HOSTILE and sent.items() <= environ.items()
    assert not list(tmp_path.rglob("marker")) and not (programs.root / "marker").exists()


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (apt-get install pdsh)")
def test_the_error_of_a_rank_is_the_last_line_over_pdsh(
    programs: Programs, local_hosts: LocalHosts, warm_python: dict[str, str], hostfile: Path, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, time\n"
        "print('begun', flush=True)\n"
        "time.sleep(1)\n"
        "print('fails.py: error: bad value', file=sys.stderr)\n"
        "sys.exit(1)\n"
    )
    words = ["--hostfile", hostfile, "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    ended = programs.python("tools/launch.py", *words, script, PATH=local_hosts.path, **warm_python)
    lines = ended.output.splitlines()
    assert (ended.returncode, sorted(lines[-2:])) == (1, [f"host-{x}: fails.py: error: bad value" for x in "ab"])
    assert sorted(lines) == sorted([*(f"host-{x}: begun" for x in "ab"), *lines[-2:]])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--master_addr=-oProxyCommand=x"], "begins with a hyphen"),
        (["--master_addr", "a;b"], "because of ';'"),
        (["--launcher_args=-x $(touch marker)"], "a shell interprets"),
        (["--launcher_args=-x 'a"], "No closing quotation"),
        (["--venv_script=a;b"], "a shell interprets"),
        (["--bind_cores_to_rank", "--bind_core_list=0;b"], "give numbers of cores"),
        (["--enable_each_rank_log=$(x)"], "a shell interprets"),
    ],
)
def test_flag_that_a_remote_shell_would_interpret_is_refused(hostfile: Path, words: list[str], reason: str) -> None:
    (message,) = refusals(hostfile, *words)
    assert reason in message and words[-1].split("=")[0] in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-i", "host-a:0@localhost", "x.py"], "--include host-a:0@localhost: without a hostfile"),
        (["-i", "localhost", "-e", "localhost:0", "x.py"], "--include and --exclude are both set"),
        (["-i", "localhost:0,0", "x.py"], "--include localhost:0,0: without a hostfile"),
        (["-i", "localhost:7-3", "x.py"], "--include localhost:7-3: without a hostfile"),
        (["absent.py"], "absent.py: no such file"),
        (["--no_python", "/no/such"], "--no_python /no/such: no such program"),
        (["--node_rank", "0", "x.py"], "--node_rank 0 has no effect without --no_ssh"),
        (["--bind_core_list", "0", "x.py"], "--bind_core_list 0 has no effect without --bind_cores_to_rank"),
        (["settings.json"], "settings.json has settings and is no program"),
        *(
            (["--bind_cores_to_rank", "--bind_core_list", cores, "x.py"], f"--bind_core_list '{cores}': give numbers")
            for cores in ("5-1", "a", "1,1", "1-2-3", "3,1-2")
        ),
        (["--bind_cores_to_rank", "x.py"], "--bind_cores_to_rank needs numactl"),
        (["--no_ssh", "x.py"], "--no_ssh needs --node_rank, .* from 0 to 0"),
        (["--no_ssh", "--node_rank", "-1", "x.py"], "--no_ssh needs --node_rank"),
        (["--no_ssh", "--node_rank", "1", "x.py"], "--no_ssh needs --node_rank"),
        (
            ["--enable_each_rank_log", "/dev/null", "x.py"],
            "--enable_each_rank_log /dev/null: /dev/null is not a folder",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_at_once(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    launch = read_launch(words)
    with pytest.raises(ConfigError, match=message):
        launcher_arguments(launch, CPU)
        check_arguments(launch, {})


def test_a_module_may_have_any_name() -> None:
    launch = read_launch(["--module", "package.json"])
    check_arguments(launch, {})
    assert launcher_arguments(launch, CPU)[-1] == "package.json"


@pytest.mark.parametrize("value", ["x $(touch m)", 'a"b', "a\nb"])
def test_variable_that_a_remote_shell_would_interpret_is_refused_without_its_value(hostfile: Path, value: str) -> None:
    (message,) = refusals(hostfile, environ={**CPU, "UCX_X": value})
    assert "UCX_X" in message and value not in message
    assert arguments(hostfile, environ={**CPU, "UCX_X": "x; touch m"}), "which DeepSpeed puts between double quotes"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A=1\nB=$(touch m)\n", ":2:3: "),
        ("# A=1\n", ":1:1: "),
        ("A;touch m=1\n", ":1:1: "),
        (None, ", which has variables for all hosts: more than the 16,777,216 bytes"),
    ],
)
def test_an_environment_file_that_cannot_be_sent_is_refused(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ".deepspeed_env"
    file.write_text(text or "")
    if text is None:
        os.truncate(file, 1 << 32)
    (message,) = refusals(hostfile)
    assert message.startswith(f"{file}{problem}")


def test_an_address_without_effect_is_a_warning(capsys: pytest.CaptureFixture) -> None:
    arguments(None, "--master_addr", "node1")
    assert "--master_addr node1 has no effect without a hostfile" in capsys.readouterr().err


def test_folder_that_a_remote_shell_would_interpret_is_refused(
    hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a;touch marker"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (message,) = refusals(hostfile)
    assert "working folder" in message and not os.listdir(folder)


def test_a_launcher_that_is_killed_is_not_a_success_and_leaves_no_rank(programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, time\n"
        f"open({str(tmp_path)!r} + '/rank', 'w').write(str(os.getpid()))\n"
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(300)\n"
    )
    command = ("tools/launch.py", "--num_gpus", "1", "--master_port", str(free_port()), script)
    assert programs.python(*command).returncode == 128 + signal.SIGKILL
    assert not psutil.pid_exists(int((tmp_path / "rank").read_text()))


def test_the_exit_code_is_the_ranks(programs: Programs, warm_python: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("raise SystemExit(7)")
    place = ("--num_gpus", "1", "--master_port", str(free_port()))
    assert programs.python("tools/launch.py", *place, tmp_path / "rank.py", **warm_python).returncode == 7


WAITING_SSH = """#!/bin/sh
for word; do case "$word" in host-*) host=$word;; esac; done
[ $host = host-1 ] && { echo "no route to host" >&2; exit 255; }
touch {folder}/$host
until [ -e {folder}/host-0 ] && [ -e {folder}/host-2 ]; do sleep 0.1; done
echo "started by $host"
"""


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh (apt-get install pdsh)")
def test_pdsh_starts_all_hosts_at_once(hostfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for all others. A host that cannot be reached is named, and the others go on."""
    from deepspeed.launcher import multinode_runner, runner

    assert PDSH_FAN_OUT == multinode_runner.PDSH_MAX_FAN_OUT
    monkeypatch.setattr(launching, "PDSH_FAN_OUT", 1)
    monkeypatch.setattr(multinode_runner, "PDSH_MAX_FAN_OUT", 1)
    (tmp_path / "ssh").write_text(WAITING_SSH.replace("{folder}", str(tmp_path)))
    (tmp_path / "ssh").chmod(0o755)
    hostfile.write_text("".join(f"host-{number} slots=8\n" for number in range(3)))
    words = arguments(hostfile)
    pdsh = multinode_runner.PDSHRunner(runner.parse_args(words), "")
    command, _, environ = pdsh.get_cmd(dict(os.environ), {f"host-{number}": [0] for number in range(3)})
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 255 and "host-1: ssh exited with exit code 255" in ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"host-{number}: started by host-{number}" for number in (0, 2)]


def test_a_list_of_hosts_that_is_too_long_for_ssh(hostfile: Path) -> None:
    hostfile.write_text("".join(f"host-{number:04} slots=8\n" for number in range(2048)))
    assert "--launcher_args=-u 9 -f 2048" in arguments(hostfile, "--launcher_args", "-u 9")
    hostfile.write_text("".join(f"host-{number:040} slots=8\n" for number in range(2048)))
    assert "2048 hosts" in refusals(hostfile)[0]
    assert arguments(hostfile, "--launcher", "openmpi")


PROGRAM = str(ROOT / "pretrain_gpt2.py")


@pytest.mark.parametrize(
    "launcher, words, message",
    [
        ("--num_gpus 3", f"{PROGRAM} {SMALL} --model-parallel-size 2", "3 processes cannot be split"),
        ("--num_gpus 3", f"{ROOT}/pretrain_gpt.py {SMALL} --model-parallel-size 2", "3 processes cannot be split"),
        ("", f"{PROGRAM} {SMALL} --model-parallel-size 3 --fp16", None),
        ("--num_gpus 2", f"{PROGRAM} {SMALL} --wrong 1 --explain", None),
        ("--hostfile hosts", f"{PROGRAM} {SMALL} --config none.yaml", "--config none.yaml: No such file or directory"),
        ("--hostfile hosts", f"{PROGRAM} {SMALL} --model-parallel-size 3 --fp16", None),
        ("--num_gpus 2", f"{ROOT}/tools/plan.py --wrong 1", None),
    ],
)
def test_arguments_are_checked_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, words: str, message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    launch = read_launch([*launcher.split(), *words.split()])
    if message is None:
        check_arguments(launch, CPU)
        return
    with pytest.raises(ConfigError) as caught:
        check_arguments(launch, CPU)
    assert len(caught.value.messages) == 1 and message in caught.value.messages[0]


@pytest.mark.parametrize(("content", "name"), [(b"global_step2", "global_step2"), (b"\xff", "\ufffd"), (None, None)])
def test_the_newest_checkpoint_is_known_whatever_its_tracker_holds(content, name, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    assert launching.newest_checkpoint(tmp_path) == name


def test_the_launcher_starts_nothing_and_imports_no_torch() -> None:
    words = [sys.executable, "-X", "importtime", ROOT / "tools" / "launch.py", "--num_gpus", "2", PROGRAM]
    ended = subprocess.run([*words, *SMALL.split(), "--wrong"], capture_output=True, text=True)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert (ended.returncode, lines) == (2, ["launch.py: error: unknown flag --wrong: see --help"])
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "megatron.tools.cluster.launching" in imported and not imported & {"torch", "deepspeed"}
