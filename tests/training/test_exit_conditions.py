"""Runs that are asked to exit: the iteration is finished, saved and resumed from."""

import re

import pytest
from support.programs import TINY_MODEL, read_metrics

from megatron.launch.environment import free_port

SETTINGS = "--train-iters 6 --batch-size 2 --global-batch-size 8 --eval-iters 0".split()


def test_a_signal_to_one_rank_makes_all_save_and_exit(programs, train_in_ranks, tmp_path) -> None:
    """With dropout on, in a pipeline with tensor parallelism; resuming gives what an uninterrupted run gives."""
    layout = "--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 4".split()
    train_in_ranks(4, *SETTINGS, *layout, "--metrics-file", tmp_path / "whole")
    parts = (*layout, "--save", tmp_path / "ck", "--load", tmp_path / "ck", "--metrics-file", tmp_path / "parts")
    left = programs.faulty(4, "signal 2 3 SIGTERM", *SETTINGS, *parts)
    assert "exiting after iteration 3: received SIGTERM" in left.output and left.returncode == 75
    assert [path.name for path in tmp_path.glob("ck/global_step*")] == ["global_step3"]
    programs.pretrain(4, *SETTINGS, *parts).ok()
    whole, found = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    names = ("iteration", "lm_loss", "grad_norm", "learning_rate")
    assert [[line[name] for name in names] for line in found] == [[line[name] for name in names] for line in whole]


def test_a_signal_during_an_evaluation_does_not_wait_for_another_iteration(programs, tmp_path) -> None:
    intervals = "--eval-iters 1 --eval-interval 2 --save-interval 2".split()
    left = programs.faulty(2, "evaluation 1 2 SIGTERM", *SETTINGS, *intervals, "--save", tmp_path / "ck")
    assert "exiting after iteration 2: received SIGTERM" in left.output and left.returncode == 75
    assert [path.name for path in tmp_path.glob("ck/global_step*")] == ["global_step2"]


@pytest.mark.parametrize("layout", ["", "--pipe-parallel-size 2"])
def test_a_signal_ends_an_evaluation(programs, tmp_path, layout: str) -> None:
    """On all ranks after the same batch; what was not evaluated is not logged."""
    words = (*SETTINGS, *layout.split(), "--eval-iters", "200", "--eval-interval", "2")
    places = ("--save", tmp_path / "ck", "--metrics-file", tmp_path / "metrics")
    left = programs.faulty(2, "evaluation 1 2 SIGTERM", *words, *places)
    assert left.returncode == 75 and "stopped after 1 of 200 batches: received SIGTERM" in left.output, left.output
    assert not [line for line in read_metrics(tmp_path / "metrics") if "validation_loss" in line]
    assert (tmp_path / "ck" / "latest").read_text() == "global_step2"


def test_a_signal_ends_the_last_evaluation(programs, tmp_path) -> None:
    """Nothing is left to train, but the run has not finished."""
    words = (*SETTINGS, "--eval-iters", "200", "--eval-interval", "6", "--save", tmp_path / "ck")
    left = programs.faulty(1, "evaluation 0 6 SIGTERM", *words)
    assert left.returncode == 75 and (tmp_path / "ck" / "latest").read_text() == "global_step6", left.output


def test_losses_since_the_last_logged_iteration_are_logged_before_the_exit(programs, tmp_path) -> None:
    words = (*SETTINGS, "--save", tmp_path / "ck", "--metrics-file")
    programs.pretrain(1, *SETTINGS, "--log-interval", "1", "--metrics-file", tmp_path / "whole").ok()
    assert programs.faulty(1, "signal 0 5 SIGTERM", *words, tmp_path / "m", "--log-interval", "3").returncode == 75
    whole, (first, rest) = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "m")
    assert (first["iteration"], rest["iteration"]) == (3, 5)
    assert rest["lm_loss"] == pytest.approx((whole[3]["lm_loss"] + whole[4]["lm_loss"]) / 2)
    assert rest["grad_norm"] == whole[4]["grad_norm"] and rest["consumed_samples"] == whole[4]["consumed_samples"]


@pytest.mark.parametrize(
    ("signals", "save", "code"),
    [("SIGUSR1", True, 75), ("SIGUSR1", False, 138), ("SIGUSR1 SIGTERM", True, 143)],
)
def test_exit_codes(programs, tmp_path, signals: str, save: bool, code: int) -> None:
    """The first signal waits for the end of the iteration, the second does not."""
    places = ("--save", tmp_path / "ck") if save else ()
    left = programs.faulty(1, f"signal 0 2 {signals}", *SETTINGS, *places, "--num-workers", "1")
    assert left.returncode == code, left.output
    at_once = " " in signals
    assert ("exiting after iteration 2: received SIGUSR1" in left.output) == (not at_once)
    assert (tmp_path / "ck" / "latest").exists() == (save and not at_once)


def test_a_signal_before_the_first_iteration_ends_the_run_at_once(programs, tmp_path) -> None:
    """Also while a library has the main thread, which can handle no signal then."""
    left = programs.faulty(1, "start 0 SIGTERM", *SETTINGS, "--save", tmp_path / "ck")
    line = "pretrain_gpt2.py: error: received SIGTERM before the first iteration; nothing was saved"
    assert left.output.splitlines()[-1] == line and left.output.count("pretrain_gpt2.py") == 1
    assert left.returncode == 75 and not list(tmp_path.glob("ck/global_step*"))


def test_ctrl_c_under_deepspeed(programs, tmp_path) -> None:
    """All of its processes receive SIGINT; the launcher sends SIGTERM besides, and the command above it ends first."""
    # A shell's background processes ignore SIGINT, and so would all that the tests start there.
    launcher = "env --default-signal=INT deepspeed --log_level critical --num_gpus 2 --master_port".split()
    words = (*TINY_MODEL, *programs.data_arguments, *SETTINGS, "--train-iters", "500", "--save", tmp_path / "ck")
    fault = {"FAULT": "terminal 1 2 SIGINT"}
    left = programs.run(*launcher, str(free_port()), "tests/support/faulty_pretrain.py", *words, **fault)
    assert left.returncode != 0 and "Traceback" not in left.output
    # A rank names the first that it received, and the launcher may be faster than the terminal.
    assert re.search("received SIG(INT|TERM)", left.output)
    (tag,) = (tmp_path / "ck").glob("global_step*")
    assert (tag / "manifest.json").exists() and (tmp_path / "ck" / "latest").read_text() == tag.name


RECEIVER = """
import os, signal, sys, time
from megatron.common.processes import ExitSignal
signal.signal(signal.SIGINT, signal.default_int_handler)
received = ExitSignal()
for name in sys.argv[1:]:
    if name == "wait":
        time.sleep(2)
        continue
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.1)
sys.exit(received.number)
"""


@pytest.mark.parametrize(
    ("launcher", "signals", "code"),
    [
        ("", "SIGINT", 2),
        ("", "SIGINT SIGINT", 130),
        ("", "SIGINT SIGTERM", 143),
        ("CROSS_RANK", "SIGINT SIGTERM", 2),
        ("CROSS_RANK", "SIGTERM SIGINT", 15),
        ("CROSS_RANK", "SIGINT SIGTERM SIGINT", 130),
        ("CROSS_RANK", "SIGUSR1 SIGTERM", 143),
        ("CROSS_RANK", "SIGTERM SIGTERM", 15),
        ("CROSS_RANK", "SIGTERM wait SIGTERM", 143),
        ("", "SIGTERM SIGTERM", 143),
        ("SLURM_STEP_ID", "SIGTERM SIGTERM", 15),
        ("SLURM_STEP_ID", "SIGUSR1 SIGTERM SIGTERM", 10),
        ("SLURM_STEP_ID", "SIGINT SIGINT", 130),
    ],
)
def test_a_second_signal_ends_at_once_unless_a_launcher_passes_the_first_on(
    programs, launcher: str, signals: str, code: int
) -> None:
    environ = {"PYTHONPATH": str(programs.root)} | ({launcher: "0"} if launcher else {})
    assert programs.python("-c", RECEIVER, *signals.split(), **environ).returncode == code


EARLY = """
import os, signal, sys, time
from megatron.launch.rank import run_rank
signal.signal(signal.SIGINT, signal.default_int_handler)
def main():
    if len(sys.argv) > 2:
        from megatron.cli import parse_run
        from megatron.training.exit_conditions import ExitConditions
        conditions = ExitConditions(parse_run(sys.argv[2:], {}))
    assert "torch" not in sys.modules
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(60)
run_rank(main)
"""


@pytest.mark.parametrize(
    ("signals", "words", "code"),
    [("SIGINT", [], -2), ("SIGINT", ["--save", "ck"], 75), ("SIGTERM", ["--save", "ck"], 75)],
)
def test_a_signal_before_torch_is_imported(programs, signals: str, words: list[str], code: int) -> None:
    """It ends the process at once; within an import a KeyboardInterrupt could be lost."""
    words = [*TINY_MODEL, "--mock-data", *SETTINGS, *words] if words else []
    ended = programs.python("-c", EARLY, signals, *words, PYTHONPATH=str(programs.root))
    assert ended.returncode == code and "Traceback" not in ended.output, ended.output


def test_the_time_limit_ends_a_run_after_an_iteration(programs, tmp_path) -> None:
    places = ("--save", tmp_path / "ck", "--exit-duration-in-mins", "0.001")
    left = programs.pretrain(1, *SETTINGS, *places).ok()
    assert "exiting after iteration 1: --exit-duration-in-mins 0.001 have passed" in left.output
    assert (tmp_path / "ck" / "latest").read_text() == "global_step1"
