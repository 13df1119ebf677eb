"""The cache of compiled extensions: one for each environment, built once, without waiting for dead processes."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.programs import BIN, Programs

from megatron.launch.environment import extensions_folder, prepare_environment

NAME = "cpu_adam"
BRIEF = "--batch-size 2 --train-iters 1 --eval-iters 0".split()
OFFLOAD = [*BRIEF, "--zero-stage", "1", "--offload-optimizer", "cpu"]


@pytest.fixture(scope="module")
def built(programs: Programs) -> Path:
    """The folder that programs find the extension in, built."""
    programs.pretrain(1, *OFFLOAD).ok()
    environ = dict(os.environ)
    prepare_environment(environ)
    return Path(environ["TORCH_EXTENSIONS_DIR"])


@pytest.fixture
def compiler(built: Path, tmp_path: Path) -> Path:
    """A fake compiler that copies the built extension and logs a line for each file."""
    script = tmp_path / "c++"
    script.write_text(f"""#!/bin/bash
        output= depends=
        arguments=("$@")
        while [ $# -gt 0 ]; do
            case $1 in -o) output=$2 ;; -MF) depends=$2 ;; esac
            shift
        done
        case "$PWD" in */{NAME}) ;; *) exec c++ "${{arguments[@]}}" ;; esac
        [ -n "$output" ] || exec c++ "${{arguments[@]}}"
        echo "$output" >> {tmp_path}/compiled
        sleep 0.5
        cp {built}/{NAME}/"$output" "$output"
        [ -z "$depends" ] || echo "$output:" > "$depends"
    """)
    script.chmod(0o755)
    return script


def compiled(tmp_path: Path) -> list[str]:
    record = tmp_path / "compiled"
    return sorted(record.read_text().split()) if record.exists() else []


def test_nothing_is_compiled_without_need(programs: Programs, tmp_path: Path) -> None:
    """Also under DeepSpeed's launcher, which sets LOCAL_SIZE; DeepSpeed's collectives would need a compiler."""
    folder = tmp_path / "cache"
    programs.pretrain(1, *BRIEF, TORCH_EXTENSIONS_DIR=str(folder), CXX="false", LOCAL_SIZE="1").ok()
    assert not folder.exists()


def test_extension_is_built_once(programs: Programs, compiler: Path, tmp_path: Path) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "CXX": str(compiler)}
    first = programs.pretrain(2, *OFFLOAD, **environ).ok()
    pieces = sorted([f"{NAME}.o", f"{NAME}_impl.o", f"{NAME}.so"])
    assert compiled(tmp_path) == pieces
    assert first.output.count("> compiling") == first.output.count("> compiled") == 1

    # Another ninja, which would not know what the first has built, comes first on the path.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ninja").symlink_to(shutil.which("false"))
    path = os.pathsep.join([str(tmp_path / "bin"), str(BIN), os.environ["PATH"]])
    again = programs.pretrain(1, *OFFLOAD, **environ, PATH=path).ok()
    assert compiled(tmp_path) == pieces
    assert "> compil" not in again.output


def test_lock_of_a_killed_build_is_ignored(programs: Programs, built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "cache") / NAME
    (folder / "lock").touch()
    ended = programs.pretrain(1, *OFFLOAD, TORCH_EXTENSIONS_DIR=str(folder.parent)).ok()
    assert f"> removing {folder}/lock, left by a build that was killed" in ended.output
    assert not (folder / "lock").exists()


def test_an_optimizer_of_deepspeed_that_cannot_be_compiled(programs: Programs, tmp_path: Path) -> None:
    """Is compiled before it is needed, as for offload."""
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "AdamW", "params": {"torch_adam": false}}}')
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "CXX": "false"}
    ended = programs.pretrain(1, *BRIEF, "--deepspeed_config", tmp_path / "ds.json", **environ)
    assert ended.returncode == 7 and "fused_adam cannot be compiled" in ended.output.splitlines()[-1]


def test_each_environment_has_its_own_cache() -> None:
    environ = {"TORCH_EXTENSIONS_DIR": ""}
    folders = {extensions_folder(environ, prefix) for prefix in (sys.prefix, "/another")}
    assert len(folders) == 2 and len({Path(folder).parent for folder in folders}) == 1


def test_a_folder_that_cannot_be_written(programs) -> None:
    ended = programs.pretrain(1, *OFFLOAD, TORCH_EXTENSIONS_DIR="/proc/extensions")
    assert ended.returncode == 7 and "Traceback" not in ended.output
    assert "/proc/extensions/" in ended.output and "set TORCH_EXTENSIONS_DIR to another folder" in ended.output
