"""Pinned requirements, Dockerfiles, compose.yaml and docker/run.sh."""

import csv
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from support.pages import commands_in_blocks

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
PYTHON = re.search(r'^requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
VERSION = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-docs.txt", "requirements-test.txt"])
def test_every_package_is_pinned(name) -> None:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith("-r requirements")]
    assert packages and all(re.fullmatch(r"[\w-]+==\d+(\.\d+)+", package) for package in packages)
    needs = {package: metadata(package.partition("==")[0])["Requires-Python"] or "" for package in packages}
    assert [package for package in packages if PYTHON not in SpecifierSet(needs[package])] == []


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_made_of_pinned_parts_for_an_ordinary_user(name) -> None:
    text = (ROOT / "docker" / name).read_text().replace("\\\n", " ")
    steps = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    tag = next(step[1] for step in steps if step[0] == "FROM").partition(":")[2]
    assert re.search(r"\d+\.\d+", tag)
    users = [step[1] for step in steps if step[0] == "USER"]
    assert users == ["trainer"] and 'useradd --create-home --shell /bin/bash --uid "$USER_ID" trainer' in text
    sources = [source for step in steps if step[0] == "COPY" for source in step[1:-1]]
    assert {"requirements.txt", "pretrain_gpt2.py", "megatron", "tasks", "benchmarks"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    entrypoint = next(json.loads(" ".join(step[1:])) for step in steps if step[0] == "ENTRYPOINT")
    assert entrypoint == ["bash", "/opt/megatron-deepspeed/docker/entrypoint.sh"]
    assert "docker/entrypoint.sh" in sources and any(step[0] == "HEALTHCHECK" for step in steps)
    assert "/etc/ssh/ssh_host_*" in text, "host keys are made at the first start, none is part of the image"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_what_the_readme_runs(name: str) -> None:
    """All but the tests."""
    instructions = (ROOT / "docker" / name).read_text()
    copied = {path for line in re.findall(r"^COPY (.+) \S+$", instructions, re.MULTILINE) for path in line.split()}
    words = {word for command in commands_in_blocks(ROOT / "README.md") for word in command.words}
    made = (".venv/", "quickstart/")  # by the quickstart
    used = {word for word in words if (ROOT / word).is_file() and not word.startswith(made)}
    assert len(used) > 5
    missing = [path for path in used if not copied & {path, path.split("/")[0]}]
    assert missing == ["run_tests.sh"]


def test_hadolint_passes() -> None:
    words = [str(Path(sys.executable).parent / "hadolint"), "--no-color", "--failure-threshold", "warning"]
    finished = subprocess.run([*words, *DOCKERFILES], cwd=ROOT / "docker", capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout


def test_two_containers_are_two_hosts() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    from deepspeed.launcher.runner import fetch_hostfile

    assert list(compose["services"]) == list(fetch_hostfile(str(ROOT / "docker" / "hostfile.compose")))
    for name, service in compose["services"].items():
        assert service["hostname"] == name and service["image"] == f"megatron-deepspeed:{VERSION}-cpu"
        assert service["secrets"] == ["ssh_key"] and "ports" not in service and service["cap_drop"] == ["ALL"]
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert compose["networks"] == {"cluster": {"internal": True}}
    assert compose["secrets"]["ssh_key"]["file"].startswith("${SSH_KEY:?")


def test_the_gpu_image_keeps_its_own_torch(tmp_path) -> None:
    """The step that makes pip's list leaves torch and its kin without a version, so that pip finds them installed."""
    program = re.search(r"RUN (sed .*?) >", (ROOT / "docker" / "Dockerfile").read_text())[1]
    finished = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {line.partition("#")[0].strip() for line in finished.stdout.splitlines()}
    assert {"torch", "numpy", "setuptools"} <= wanted
    assert {name.partition("==")[0] for name in wanted if "==" in name} == {"deepspeed", "mpi4py", "tokenizers"}


def test_an_environment_that_cannot_be_installed_ends_the_build(tmp_path) -> None:
    """The CPU image's step fails as pip does, and does not count as done."""
    for name in ("requirements.txt", "tools/environment.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    text = (ROOT / "docker" / "Dockerfile.cpu").read_text().replace("\\\n", " ")
    step = re.search(r"^RUN (PIP.*)", text, re.MULTILINE)[1]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VIRTUAL_ENV": str(tmp_path)}
    assert subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environ).returncode == 3
    assert not (tmp_path / ".installed-requirements.txt").exists()


def test_the_container_gets_the_hosts_gpus_network_and_folders(tmp_path) -> None:
    def docker(flag: str = "--seed", **variables: str) -> list[str]:
        environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "DATA_DIR": str(tmp_path / "my data"), **variables}
        words = ["bash", "docker/run.sh", "bash", "examples/ds_pretrain_gpt2.sh", flag, "7"]
        finished = subprocess.run(
            words, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        return shlex.split(finished.stdout.splitlines()[-1])

    words = docker()
    inside = re.search(r"^WORKDIR (.*)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)[1]
    assert words[:2] == ["docker", "run"]
    assert words[-5:] == [f"megatron-deepspeed:{VERSION}", "bash", "examples/ds_pretrain_gpt2.sh", "--seed", "7"]
    assert f"type=bind,source={tmp_path}/my data,target={inside}/data" in words
    assert f"type=bind,source={ROOT}/checkpoints,target={inside}/checkpoints" in words
    for name in ("a,b", 'a "b", c', '"'):
        mounts = [word for word in docker(DATA_DIR=str(tmp_path / name)) if word.startswith("type=bind")]
        (fields,) = csv.reader(mounts[:1])
        assert fields == ["type=bind", f"source={tmp_path / name}", f"target={inside}/data"]
    for flag in ("--gpus all", "--ulimit memlock=-1", "--network host", "--ipc=host"):
        assert f" {flag} " in " ".join(words)
    assert "--env NVIDIA_VISIBLE_DEVICES=0,1" in " ".join(docker(DOCKER="nvidia-docker", GPUS="0,1"))
    podman = docker(DOCKER="/usr/bin/podman", GPUS="0,1")
    assert podman[:2] == ["/usr/bin/podman", "run"] and "--gpus" not in podman
    assert {"nvidia.com/gpu=0", "nvidia.com/gpu=1"} <= set(podman)
    assert "--gpus" not in docker(GPUS="") and "ssh_key" not in " ".join(words)
    over_ssh = docker(SSH_KEY="pyproject.toml", SSH_ADDRESS="10.0.0.1", GLOO_SOCKET_IFNAME="ib0")
    assert f"type=bind,source={ROOT}/pyproject.toml,target=/run/secrets/ssh_key,readonly" in over_ssh
    for flag in ("--env SSH_ADDRESS=10.0.0.1", "--env SSH_PORT=2222", "--env GLOO_SOCKET_IFNAME"):
        assert f" {flag} " in " ".join(over_ssh)
    tuned = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_BLOCKING_WAIT"
    words = docker(INFINIBAND=str(tmp_path), **dict.fromkeys(tuned, "1"))
    for flag in (f"--device {tmp_path}", *(f"--env {name}" for name in tuned)):
        assert f" {flag} " in " ".join(words)
    assert "--device" not in docker(INFINIBAND="") and "--device" not in docker(INFINIBAND=str(tmp_path / "none"))
    assert docker("--help")[-2:] == ["--help", "7"], "of the command"
    for wrong in ({"SSH_KEY": "pyproject.toml"}, {"DOCKER": "no-docker", "DRY_RUN": "0"}):
        with pytest.raises(subprocess.CalledProcessError) as error:
            docker(**wrong)
        assert error.value.returncode == 2 and error.value.stderr.startswith("run.sh: error: ")
    assert not (tmp_path / "my data").exists(), "a dry run makes nothing"
