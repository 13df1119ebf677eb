"""What the program prints. Its losses under every launcher are compared in test_multihost.py, over two hosts; it learns
under deepspeed on one host in tests/test_quickstart.py, and under torchrun and Slurm in tests/test_shipped_files.py."""

import pytest
from support.command_lines import latest
from support.programs import TINY_MODEL, Programs

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


def test_verbose_output_is_that_of_deepspeed(programs, arguments):
    assert "DeepSpeed" in programs.warm(1, *map(str, arguments), "--model-parallel-size", "1", "--verbose").ok().output
