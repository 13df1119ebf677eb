"""The program starts alike under every launcher on a host, with the same output.

That of deepspeed and torchrun is shown by the scripts in tests/test_shipped_files.py, over hosts by test_multihost.py.
"""

import pytest
from support.command_lines import latest
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.launch.environment import free_port

SETTINGS = (
    "--train-iters 2 --batch-size 2 --global-batch-size 8 --eval-iters 0 --model-parallel-size 2 --pipe-parallel-size 1"
).split()


@pytest.fixture(scope="module")
def arguments(programs: Programs) -> list[str]:
    return ["pretrain_gpt2.py", *TINY_MODEL, *SETTINGS, *programs.data_arguments]


@pytest.fixture(scope="module")
def losses(train_in_ranks, tmp_path_factory) -> list[float]:
    """Of two ranks that were started by none."""
    metrics = tmp_path_factory.mktemp("ranks") / "metrics"
    train_in_ranks(2, *SETTINGS, "--metrics-file", metrics)
    return [line["lm_loss"] for line in read_metrics(metrics)]


COMMANDS = {
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "python"],
    "accelerate": ["accelerate", "launch", "--use_deepspeed", "--num_processes", "2", "--main_process_port", "0"],
}


@pytest.mark.parametrize("launcher", COMMANDS)
def test_losses_are_equal_under_every_launcher(programs, arguments, losses, tmp_path, launcher):
    metrics = ("--metrics-file", tmp_path / "metrics")
    finished = programs.run(*COMMANDS[launcher], *arguments, *metrics, MASTER_PORT=str(free_port())).ok()
    found = read_metrics(tmp_path / "metrics")
    assert [line["lm_loss"] for line in found] == losses and len(losses) == 2
    assert finished.output.count("> layout") == 1, "one rank prints"


def test_output_has_only_the_summary_and_progress(programs, arguments):
    """Nothing of DeepSpeed's, torch's or gloo's chatter: only the summary and a line for each iteration."""
    one_process = latest([*map(str, arguments), "--model-parallel-size", "1"])
    lines = programs.python(*one_process).ok().output.splitlines()
    begins = ("> layout", "> model", "> batch", "> training", "> device", "> deepspeed", "> stage", "> parameters")
    assert [begin for begin in begins if any(line.startswith(begin) for line in lines)] == list(begins), lines
    assert all(line.startswith(("> ", "iteration ")) for line in lines), lines
    assert [line[:13] for line in lines[-2:]] == ["iteration 1/2", "iteration 2/2"]


def test_verbose_output_is_that_of_deepspeed(programs, arguments):
    """And a run that compiles nothing imports no compiler, which takes longer than torch."""
    flags = "--model-parallel-size 1 --zero-stage 1 --checkpoint-activations --verbose".split()
    output = programs.python(*latest([*map(str, arguments), *flags]), PYTHONPROFILEIMPORTTIME="1").ok().output
    assert "DeepSpeed" in output and "import time:" in output and "torch._dynamo" not in output
