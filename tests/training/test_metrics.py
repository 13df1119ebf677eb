"""The metrics file, TensorBoard and the progress line."""

import json
import math
import re
import resource
import shutil
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_lines import parse
from support.programs import TINY_MODEL, read_metrics
from support.training import pretrain
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.engines.status import HostCopy, StepStatus
from megatron.launch.rank import _report_thread
from megatron.tools.reporting.files import read_series
from megatron.training.callbacks import OWN_METRICS
from megatron.training.metrics import MetricsLogger
from megatron.training.setup import log_configuration
from megatron.training.summary import describe_config

STEP_KEYS = {"iteration", *OWN_METRICS}


def test_file_tensorboard_and_screen_agree(programs, tmp_path):
    """And the CSV file of DeepSpeed's monitor; its profile is at most as deep as the model."""
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    profile = {"enabled": True, "profile_step": 2, "module_depth": 99, "output_file": str(tmp_path / "profile")}
    (tmp_path / "ds.json").write_text(json.dumps({"csv_monitor": monitor, "flops_profiler": profile}))
    words = "--train-iters 4 --batch-size 2 --gas 2 --eval-iters 2 --eval-interval 3"
    files = f"--metrics-file {tmp_path}/logs/metrics --tensorboard-dir {tmp_path}/board"
    output = programs.pretrain(1, *f"{words} {files} --deepspeed_config {tmp_path}/ds.json".split()).ok().output
    lines = read_metrics(tmp_path / "logs" / "metrics")
    steps = [line for line in lines if "lm_loss" in line]
    assert [set(step) for step in steps] == [STEP_KEYS] * 4
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    assert [step["consumed_samples"] for step in steps] == [4, 8, 12, 16]
    assert [step["consumed_tokens"] for step in steps] == [128, 256, 384, 512]
    validations = [line for line in lines if "validation_loss" in line]
    assert [line["iteration"] for line in validations] == [3, 4]
    for line in validations:
        assert line["validation_ppl"] == pytest.approx(math.exp(line["validation_loss"]))
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(board.Tags()["scalars"]) >= (STEP_KEYS - {"iteration"}) | {"validation_loss", "test_ppl"}
    assert [event.value for event in board.Scalars("lm_loss")] == pytest.approx([step["lm_loss"] for step in steps])
    assert "config/text_summary" in board.Tags()["tensors"]
    table = (tmp_path / "csv" / "Train_Samples_train_loss.csv").read_text().split()[1:]
    assert [float(row.split(",")[1]) for row in table] == pytest.approx([step["lm_loss"] for step in steps])
    assert re.findall(r"depth (\d+):", (tmp_path / "profile").read_text())[-1] == "3"
    progress = [line for line in output.splitlines() if line.startswith("iteration")]
    assert len(progress) == 4 and f"loss {steps[3]['lm_loss']:.4f}" in progress[3] and "ETA 0:00:00" in progress[3]


def test_a_log_interval_is_averaged(train_in_ranks, tmp_path):
    settings = "--train-iters 5 --batch-size 2 --eval-iters 0".split()
    train_in_ranks(1, *settings, "--metrics-file", tmp_path / "each")
    output = train_in_ranks(1, *settings, "--metrics-file", tmp_path / "some", "--log-interval", "2")
    assert [line.split(" | ")[1][11:] for line in output.splitlines() if line.startswith("iteration")] == [
        " (mean of 2)", " (mean of 2)", ""
    ]  # fmt: skip
    each = [line["lm_loss"] for line in read_metrics(tmp_path / "each")]
    some = {line["iteration"]: line["lm_loss"] for line in read_metrics(tmp_path / "some")}
    assert some == pytest.approx({2: sum(each[:2]) / 2, 4: sum(each[2:4]) / 2, 5: each[4]})


def lines_of_slow_iterations(run, monkeypatch, capsys, *, is_terminal):
    """Iterations, then batches of an evaluation, of 2 s each: the lines printed and the iterations in the file."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    log = MetricsLogger(run, is_main_rank=True)
    log.start()
    for iteration in range(1, 16):
        now[0] += 2
        status = StepStatus(HostCopy({"skipped": False, "loss_scale": 1.0}), 1e-3, 0.5, 0)
        log.add(iteration, torch.tensor(float(iteration)), status)
        if log.has_line(iteration):
            log.report(iteration, status, HostCopy(log.means() | {"grad_norm": status.grad_norm}).read())
    for _ in log.counting(30, "evaluating"):
        now[0] += 2
    log.close()
    recorded = [line["iteration"] for line in read_metrics(Path(run.logging.metrics_file))]
    return capsys.readouterr().out.splitlines(), recorded


def test_the_line_names_units_that_fit_and_only_what_applies(monkeypatch, capsys, tmp_path):
    run = parse(f"--train-iters 3 --metrics-file {tmp_path}/file")
    run = replace(run, model=replace(run.model, padded_vocab_size=128))
    lines, _ = lines_of_slow_iterations(run, monkeypatch, capsys, is_terminal=False)
    assert re.search(r"\| 32 tokens/s \| [\d.]+ MFLOP/s \| memory [\d.]+ [MG]B \|", lines[0]), lines[0]
    assert "loss scale" not in lines[0] and "mean of" not in lines[0]
    half = replace(run, precision=replace(run.precision, fp16=True))
    lines, _ = lines_of_slow_iterations(half, monkeypatch, capsys, is_terminal=False)
    assert "| loss scale 1 |" in lines[0]
    wide = replace(half, train=replace(half.train, train_iters=10**12))
    lines, _ = lines_of_slow_iterations(wide, monkeypatch, capsys, is_terminal=False)
    assert lines[0].startswith("iteration") and lines[1].startswith("  ") and max(map(len, lines)) <= 160


WIDE = """--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 2048
    --normalization RMSNorm --swiglu --qk-layernorm --disable-bias-linear --add-qkv-bias --num-query-groups 2 --bf16
    --untie-embeddings-and-output-weights --num-experts 8 --moe-shared-expert-intermediate-size 64"""


def test_lines_about_a_run_fit_and_keep_their_words(capsys):
    run = parse(WIDE)
    words = " ".join(f"> {name:9} {text}" for name, text in describe_config(run).items()).split()
    assert max(map(len, describe_config(run).values())) > 190
    log_configuration(run, MetricsLogger(run, is_main_rank=True))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 160 and all(line.startswith("> ") for line in lines)
    shown = " ".join(line.removeprefix(">           ") for line in lines).split()
    assert shown[: len(words)] == words


def test_a_terminal_is_never_quiet_for_long_and_files_do_not_depend_on_it(monkeypatch, capsys, tmp_path):
    words = f"--train-iters 1000 --metrics-file {tmp_path}"
    run = parse(f"{words}/terminal")
    run = replace(run, model=replace(run.model, padded_vocab_size=128))
    lines, recorded = lines_of_slow_iterations(run, monkeypatch, capsys, is_terminal=True)
    iterations = {int(line[10:14]): line for line in lines if line.startswith("iteration")}
    assert [*iterations] == [1, 2, 3, 4, 5, 8, 11, 14]
    assert "| loss 10.0000 (mean of 9) |" in iterations[14] and "| step 2 s |" in iterations[14]
    assert lines[8:] == [f"  evaluating: {number} of 30 batches" for number in range(2, 30, 3)]
    assert recorded == [1, 2, 3, 4, 5]
    pipe = replace(run, logging=replace(run.logging, metrics_file=f"{tmp_path}/pipe"))
    lines, recorded_in_pipe = lines_of_slow_iterations(pipe, monkeypatch, capsys, is_terminal=False)
    assert len(lines) == 6 and lines[-1] == "  evaluating: 25 of 30 batches" and recorded_in_pipe == recorded
    every = replace(run, logging=replace(run.logging, log_interval=10, metrics_file=f"{tmp_path}/interval"))
    lines, _ = lines_of_slow_iterations(every, monkeypatch, capsys, is_terminal=True)
    assert [line[:14] for line in lines if line.startswith("iteration")] == ["iteration   10"]


@pytest.mark.parametrize(
    ("words", "resumed_after", "expected"),
    [
        ("--train-iters 20", 0, [*range(1, 21)]),
        ("--train-iters 501", 0, [1, 2, 3, 4, 5, *range(10, 501, 10), 501]),
        ("--train-iters 501", 300, [*range(310, 501, 10), 501]),
        ("--train-iters 501", 306, [*range(320, 501, 10), 501]),
        ("--train-iters 501", 2, [3, 4, 5, *range(10, 501, 10), 501]),
        ("--train-iters 9999", 0, [1, 2, 3, 4, 5, *range(100, 10000, 100), 9999]),
        ("--train-iters 9999 --log-interval 4000", 0, [4000, 8000, 9999]),
    ],
)
def test_the_first_iterations_are_logged_and_then_about_every_thirtieth_of_the_run(words, resumed_after, expected):
    run = parse(words)
    run = replace(run, train=replace(run.train, resumed_after=resumed_after))
    following = range(resumed_after + 1, run.train.train_iters + 1)
    assert [iteration for iteration in following if run.is_logged(iteration)] == expected


def train_with_small_files(words: list[str]) -> tuple[int, str]:
    sys.dont_write_bytecode = True  # Python would cut the files of modules, and leave them
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    return pretrain(words)


def test_full_disk_does_not_end_the_run(run_ranks_once, programs, tmp_path):
    settings = f"--train-iters 6 --batch-size 2 --eval-iters 0 --metrics-file {tmp_path}/few"
    words = [*TINY_MODEL, *programs.data_arguments, *settings.split()]
    ((code, output),) = run_ranks_once(1, train_with_small_files, words)
    assert code == 0 and "iteration 6/6" in output
    assert "warning: metrics cannot be written (File too large); continuing without" in output
    few = (tmp_path / "few").read_text().splitlines()[:-1]  # the last line may be cut
    assert 0 < len(few) < 6 and all(json.loads(line)["lm_loss"] > 0 for line in few)


@pytest.mark.parametrize(
    ("left", "read"), [('{"iteration": 2, "lm_l', [1]), ('{"iteration": 2, "lm_loss": 5.0}', [1, 2])]
)
def test_a_line_that_a_killed_process_has_left(left: str, read: list[int], tmp_path: Path) -> None:
    (file := tmp_path / "m").write_text('{"iteration": 1, "lm_loss": 5.5}\n' + left)
    assert [*read_series(file, ["lm_loss", "validation_loss"])["lm_loss"]] == read
    log = MetricsLogger(parse(f"--metrics-file {file}"), is_main_rank=True)
    log.record(3, {"lm_loss": 4.5})
    log.close()
    assert [json.loads(line)["iteration"] for line in file.read_text().splitlines()] == [*read, 3]


@pytest.mark.parametrize("full", ["_file", "_board"])
def test_one_full_disk_ends_one_of_the_two_records(full: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Of the metrics file and TensorBoard; with one warning."""
    words = f"--train-iters 4 --eval-iters 0 --metrics-file {tmp_path}/m --tensorboard-dir {tmp_path}/b"
    log = MetricsLogger(parse(words), is_main_rank=True)
    written: list[int] = []

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    class Output:
        def __init__(self, call) -> None:
            self.write = self.add_scalar = call
            self.close = lambda: None

    for name in ("_file", "_board"):
        setattr(log, name, Output(fail if name == full else lambda *_: written.append(1)))
    for iteration in (1, 2):
        log.record(iteration, {"loss": 1.0})
    log.close()
    what = "metrics" if full == "_file" else "TensorBoard's file"
    assert capsys.readouterr().out == (
        f"  warning: {what} cannot be written (No space left on device); continuing without\n"
    )
    assert len(written) == 2


def test_a_folder_of_tensorboard_that_is_removed_is_one_warning(tmp_path: Path, monkeypatch, capsys) -> None:
    """TensorBoard writes in a thread of its own."""
    monkeypatch.setattr(threading, "excepthook", _report_thread)
    log = MetricsLogger(parse(f"--train-iters 9 --eval-iters 0 --tensorboard-dir {tmp_path}/b"), is_main_rank=True)
    for iteration in range(1, 9):
        log.record(iteration, {"loss": 1.0})
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        if log._board is not None:
            with suppress(OSError):
                log._board.flush()
    log.close()
    out, err = capsys.readouterr()
    assert (
        out.startswith(f"  warning: TensorBoard's file cannot be written ({tmp_path}/b/events.")
        and out.count("\n") == 1
    )
    assert err == ""
