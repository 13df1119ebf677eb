"""Weights & Biases, offline, and MLflow get what the metrics file gets."""

import importlib.util

import pytest
from support.command_lines import parse

from megatron.tools.reporting import callbacks
from megatron.tools.reporting.callbacks import Trackers


class Recorded:
    """A package that records, and fails at iteration 3."""

    def __init__(self, run, settings):
        self.settings, self.seen = settings, []

    def log(self, numbers, iteration):
        if iteration == 3:
            raise ConnectionError("no\nnetwork")
        self.seen.append((iteration, numbers))


def test_a_package_that_fails_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(callbacks, "_WandbRun", Recorded)
    callback = Trackers()
    callback.on_run_start(parse("--train-iters 9 --wandb-project p"), "cpu")
    recorded = callback._runs["wandb"]
    for iteration in (1, 3, 4):
        callback.on_metrics(iteration, {"lm_loss": 1.0, "grad_norm": None})
    callback.on_run_end()
    assert recorded.seen == [(1, {"lm_loss": 1.0})] and recorded.settings["train.train_iters"] == 9
    assert "wandb failed, continuing without: no network" in "".join(capsys.readouterr())


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    _log_once("--wandb-project p --wandb-exp-name n")
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    _log_once("--mlflow-experiment p")
    (file,) = tmp_path.rglob("lm_loss")
    assert [line.split()[1:] for line in file.read_text().splitlines()] == [["2.5", "1"], ["2.0", "2"]]


def _log_once(flags):
    callback = Trackers()
    callback.on_run_start(parse(f"--train-iters 9 {flags}"), "cpu")
    callback.on_metrics(1, {"lm_loss": 2.5})
    callback.on_metrics(2, {"lm_loss": 2.0})
    assert callback._runs
    callback.on_run_end()
