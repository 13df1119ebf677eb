"""A run whose output cannot be written continues: stdout full, closed, or a pipe that no process reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs, read_metrics
from support.warm import exit_code, start

from megatron.common.screen import LossyStream

SETTINGS = "--batch-size 2 --train-iters 2 --eval-iters 0".split()


def test_a_run_whose_pipe_breaks_trains_and_saves(programs: Programs, tmp_path: Path) -> None:
    log = tmp_path / "pipe"
    words = [*SETTINGS, "--save", tmp_path / "ck", "--metrics-file", tmp_path / "metrics"]
    os.mkfifo(log)
    command = ("pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, *words)
    run = start(command, os.environ, programs.root, log)
    with open(log) as reader:
        reader.readline()
    assert exit_code([run], 200) == 0
    assert (tmp_path / "ck" / "latest").read_text() == "global_step2"
    assert [line["iteration"] for line in read_metrics(tmp_path / "metrics")] == [1, 2]


CLOSED = """
import os, sys
from megatron.launch.rank import run_rank
from megatron.tools.command_line import run_tool
def main():
    assert os.open(__file__, os.O_RDONLY) > 2, "a new file has the number of a standard stream"
    print("text", file=sys.stdout), print("text", file=sys.stderr)
    sys.stdout.flush()
{run}(main)
"""


@pytest.mark.parametrize("run", ["run_rank", "run_tool"])
def test_closed_streams_are_opened(tmp_path: Path, run: str) -> None:
    (tmp_path / "program.py").write_text(CLOSED.format(run=run))
    shell = f"{sys.executable} {tmp_path / 'program.py'} <&- >&- 2>&-"
    assert subprocess.run(shell, shell=True, env={**os.environ, "PYTHONPATH": os.getcwd()}).returncode == 0


def test_the_first_loss_is_reported(capsys: pytest.CaptureFixture) -> None:
    with open("/dev/full", "w") as full:
        stream = LossyStream(full, "stdout")
        for _ in range(3):
            print("text", file=stream, flush=True)
        assert stream.fileno() == full.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left in its buffer
    assert capsys.readouterr().err.splitlines() == [
        "warning: stdout cannot be written (No space left on device); continuing without"
    ]
