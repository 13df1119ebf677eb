"""What the program prints, and a run whose output cannot be written.

Losses under every launcher are compared in test_multihost.py, over two hosts; under torchrun and Slurm on one host in
tests/test_shipped_files.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_lines import latest
from support.evaluating import load_tool
from support.programs import TINY_MODEL, Programs, read_metrics
from support.warm import exit_code, start

from megatron.common.errors import ResourceError
from megatron.common.screen import LossyStream, check_output
from megatron.launch.environment import free_port

SETTINGS = (
    "--train-iters 2 --batch-size 2 --global-batch-size 8 --eval-iters 0 --model-parallel-size 2 --pipe-parallel-size 1"
).split()


@pytest.fixture(scope="module")
def arguments(programs: Programs) -> list[str]:
    return ["pretrain_gpt2.py", *TINY_MODEL, *SETTINGS, *programs.data_arguments]


def test_output_has_only_the_summary_and_progress(programs, arguments):
    """Nothing of DeepSpeed's, torch's or gloo's chatter: only the summary and a line for each iteration.

    And a run that compiles nothing imports no compiler, which takes longer than torch.
    """
    flags = "--model-parallel-size 1 --zero-stage 1 --checkpoint-activations".split()
    output = programs.python(*latest([*map(str, arguments), *flags]), PYTHONPROFILEIMPORTTIME="1").ok().output
    assert "import time:" in output and "torch._dynamo" not in output
    lines = [line for line in output.splitlines() if not line.startswith("import time:")]
    begins = ("> layout", "> model", "> batch", "> training", "> device", "> deepspeed", "> stage", "> parameters")
    assert [begin for begin in begins if any(line.startswith(begin) for line in lines)] == list(begins), lines
    assert all(line.startswith(("> ", "iteration ")) for line in lines), lines
    assert [line[:13] for line in lines[-2:]] == ["iteration 1/2", "iteration 2/2"]


def test_the_error_of_a_rank_is_all_that_is_printed(programs, arguments):
    """By the documented command; at DeepSpeed's own log level its launcher would repeat the whole command after it."""
    launcher = f"deepspeed --log_level critical --num_gpus 2 --master_port {free_port()}".split()
    ended = programs.run(*launcher, *map(str, arguments), "--hidden-size", "33")
    error = "pretrain_gpt2.py: error: --hidden-size 33 is not a multiple of --num-attention-heads 4: use 32 or 36\n"
    assert (ended.returncode, ended.output) == (2, error)


def test_verbose_output_is_that_of_deepspeed(programs, arguments):
    assert "DeepSpeed" in programs.warm(1, *map(str, arguments), "--model-parallel-size", "1", "--verbose").ok().output


BRIEF = "--batch-size 2 --train-iters 2 --eval-iters 0".split()


def test_a_run_whose_pipe_breaks_trains_and_saves(programs: Programs, tmp_path: Path) -> None:
    log = tmp_path / "pipe"
    words = [*BRIEF, "--save", tmp_path / "ck", "--metrics-file", tmp_path / "metrics"]
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


def test_a_lost_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    write_result = load_tool("evaluate").write_result
    check_output()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", LossyStream(full, "stdout"))
        with pytest.raises(ResourceError, match="No space left on device"):
            write_result({"loss": 1.0}, None)
        write_result({"loss": 1.0}, Path(os.devnull))
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
