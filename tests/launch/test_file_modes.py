"""Permissions of what the programs write, whatever the umask they are started with."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs
from support.training import pretrain

from megatron.common.errors import ConfigError
from megatron.common.files import UMASK, replace_file, restrict_new_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def restored_umask() -> Iterator[None]:
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def modes(folder: Path) -> set[tuple[bool, int]]:
    """Whether it is a folder, and permissions, of everything in ``folder``."""
    return {(path.is_dir(), path.stat().st_mode & 0o777) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("umask", "setting", "mode"),
    [
        *((0o000, "", 0o640), (0o022, "", 0o640), (0o077, "", 0o600)),
        *((0o000, "022", 0o644), (0o022, "022", 0o644), (0o000, "0007", 0o660), (0o000, "077", 0o600)),
    ],
)
def test_new_files(tmp_path: Path, monkeypatch, restored_umask: None, umask: int, setting: str, mode: int) -> None:
    monkeypatch.setenv(UMASK, setting)
    os.umask(umask)
    with replace_file(tmp_path / "explicit") as file:
        file.write(b"")
    restrict_new_files(os.environ)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("")
    assert modes(tmp_path) == {(False, mode), (True, mode | mode >> 2 & 0o111)}


def test_a_device_is_written_to_and_not_replaced() -> None:
    """As ``--json /dev/null`` of root would replace it: a terminal, in whose folder no file can be made."""
    screen, terminal = os.openpty()
    with replace_file(Path(os.ttyname(terminal)), text=True) as file:
        file.write("shown")
    assert os.read(screen, 100) == b"shown"
    for end in (screen, terminal):
        os.close(end)


@pytest.mark.parametrize("text", ["000", "020", "722", "8", "rw-r--r--"])
def test_a_setting_that_opens_files_to_writing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{UMASK}={text} must be 027 "):
        restrict_new_files({UMASK: text})


def test_a_umask_that_locks_the_owner_out_is_refused(restored_umask: None) -> None:
    os.umask(0o777)
    with pytest.raises(ConfigError, match="^umask 777 takes permissions from the owner"):
        restrict_new_files({})


def test_programs_restrict_their_files(tmp_path: Path) -> None:
    """Those of several ranks, and all others."""
    writes = "lambda: pathlib.Path({!r}).write_text('') and None"
    for name, runner in {
        "rank": "megatron.launch.rank.run_rank",
        "tool": "megatron.tools.command_line.run_tool",
    }.items():
        code = f"import pathlib, {runner.rpartition('.')[0]} as m; m.{runner.rpartition('.')[2]}({writes.format(name)})"
        words = ["bash", "-c", 'umask 000; exec "$@"', "bash", sys.executable, "-c", code]
        subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


def train_under(umask: int, words: list[str]) -> int:
    """The exit code of a run in a process that was started with this umask."""
    os.umask(umask)
    restrict_new_files(os.environ)
    return pretrain(words)[0]


def test_all_outputs_of_a_run(programs: Programs, run_ranks_once, tmp_path: Path) -> None:
    """Checkpoints, index maps, TensorBoard, metrics, traces and the record of the run."""
    outputs = {
        "--save": "checkpoints",
        "--data-cache-path": "maps",
        "--tensorboard-dir": "board",
        "--trace": "trace",
        "--run-dir": "record",
        "--metrics-file": "metrics/of/run.jsonl",
    }
    words = [*TINY_MODEL, *programs.data_arguments, *"--train-iters 2 --batch-size 2 --eval-iters 0".split()]
    words += [word for flag, name in outputs.items() for word in (flag, str(tmp_path / "out" / name))]
    assert run_ranks_once(1, train_under, 0o000, [*words, "--trace-steps", "1:1"]) == [0]
    assert modes(tmp_path) == {(False, 0o640), (True, 0o750)}
    assert {name.split("/")[0] for name in outputs.values()} == {path.name for path in (tmp_path / "out").iterdir()}
    assert all(any(path.is_file() for path in folder.rglob("*")) for folder in (tmp_path / "out").iterdir())
