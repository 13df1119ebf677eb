"""Stopping and resuming equals not stopping, to the last bit."""

import shutil

import pytest
from support.programs import read_metrics

from megatron.checkpoint.commit import publish

SETTINGS = ("--train-iters 4 --batch-size 2 --gas 2 --eval-iters 1 --eval-interval 2 --num-workers 1").split()
EXACT = ("consumed_samples", "lm_loss", "learning_rate", "grad_norm", "validation_loss", "test_loss")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, "--pipe-parallel-size 2 --zero-stage 1 --bf16 --checkpoint-activations"),
        (2, "--zero-stage 2"),
        (2, "--zero-stage 3"),
        (1, "--pipe-parallel-size 1 --zero-stage 0 --bf16"),  # which is ZeRO 1
        (2, "--model-parallel-size 2 --sequence-parallel --bf16 --fp8-format hybrid --fp8-min-size 16"),
        (2, "--pipe-parallel-size 2 --pipeline-schedule dualpipev --gas 4 --pipeline-partition 0,1,1,2"),
    ],
)
def test_resume_is_bit_identical(programs, train_in_ranks, tmp_path, processes, flags):
    """With dropout on, gradient accumulation and a validation between: losses, rates and samples continue exactly."""
    layout, saves = flags.split(), ("--save", tmp_path / "ck", "--load", tmp_path / "ck")
    train_in_ranks(processes, *SETTINGS, *layout, *saves, "--save-interval", "2", "--metrics-file", tmp_path / "whole")
    shutil.rmtree(tmp_path / "ck" / "global_step4")
    publish(tmp_path / "ck", "global_step2", 2)
    second = programs.pretrain(processes, *SETTINGS, *layout, *saves, "--metrics-file", tmp_path / "parts").ok()
    assert "resuming after iteration 2" in second.output
    whole, parts = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    rest = [line for line in whole if line["iteration"] > 2]
    assert len(rest) == 4  # a validation and the test
    assert [{name: line.get(name) for name in EXACT} for line in parts] == [
        {name: line.get(name) for name in EXACT} for line in rest
    ]
    assert (tmp_path / "ck" / "latest").read_text() == "global_step4"


def times(folder):
    """The time of the last change of each file of ``folder``, and of the folder."""
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def test_a_finished_run_trains_and_evaluates_nothing_unless_asked(train_in_ranks, tmp_path):
    folder = ("--save", tmp_path / "ck", "--load", tmp_path / "ck", "--metrics-file", tmp_path / "metrics")
    train_in_ranks(2, *SETTINGS, *folder)
    once = read_metrics(tmp_path / "metrics")
    (tmp_path / "ck" / "latest").write_text("global_step2")
    output = train_in_ranks(2, *SETTINGS, *folder)
    assert f"> warning: {tmp_path}/ck/latest names global_step2, which is not in {tmp_path}/ck\n" in output
    assert (
        "> already finished: " in output and "is from iteration 4 of 4; to continue, increase --train-iters" in output
    )
    assert "validation" not in output and "iteration 4/4" not in output and read_metrics(tmp_path / "metrics") == once
    before = times(tmp_path / "ck")
    assert "test after iteration 4" in train_in_ranks(2, *SETTINGS, *folder, "--skip-train")
    assert times(tmp_path / "ck") == before
    assert read_metrics(tmp_path / "metrics") == [*once, *once[-2:]]
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "4"
    weights = ("--load", tmp_path / "ck", "--finetune", "--skip-train")
    assert "validation after iteration 0" in train_in_ranks(1, *SETTINGS, *weights)
