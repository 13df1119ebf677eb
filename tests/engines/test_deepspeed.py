"""What this suite replaces of DeepSpeed is there in the tested version."""

import os
import types

import deepspeed
import pytest
import torch
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler

from megatron.common.errors import ConfigError
from megatron.engines import (
    TESTED_VERSION,
    continue_without_reports,
    deepspeed_silenced,
    discover_mpi_ranks,
    reports_optional,
)
from megatron.tools.reporting.tracing import collectives_timed
from megatron.training.setup import check_safe_modules


def test_the_installed_version_is_the_tested_one() -> None:
    assert deepspeed.__version__ == TESTED_VERSION


@pytest.mark.parametrize("name", ["a.B", "torch.nn.Nope", "torch.nn.functional.linear", "os.path"])
def test_a_safe_module_that_is_none_is_refused(name: str) -> None:
    """DeepSpeed raises ValueError once the model is built, or ignores the name."""
    config = {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", name]}
    check_safe_modules({"torch_autocast": {**config, "enabled": False}})
    with pytest.raises(ConfigError, match=f"lower_precision_safe_modules: {name} is no class of modules"):
        check_safe_modules({"torch_autocast": config})


def test_a_report_that_cannot_be_written_is_a_warning(capsys: pytest.CaptureFixture) -> None:
    """The disk is full, for the profile of a step and for the monitors."""
    model = torch.nn.Linear(2, 2)
    profiler = FlopsProfiler(model)

    def write_events(events: list) -> None:
        with open("/dev/full", "w", buffering=1) as file:
            file.write("loss\n")

    engine = types.SimpleNamespace(flops_profiler=profiler, monitor=types.SimpleNamespace(write_events=write_events))
    continue_without_reports(engine)
    for _ in range(2):
        profiler.start_profile()
        model(torch.ones(1, 2))
        profiler.print_model_profile(output_file="/dev/full")
        profiler.end_profile()
        engine.monitor.write_events([])
    assert capsys.readouterr().err.splitlines() == [
        f"  warning: {what} cannot be written (No space left on device); continuing without"
        for what in ("the profile of flops_profiler", "the files of DeepSpeed's monitors")
    ]


def test_a_board_that_cannot_be_opened_is_a_warning(monkeypatch, capfd: pytest.CaptureFixture) -> None:
    """DeepSpeed opens it while it builds an engine, when nothing reaches stdout."""

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoardMonitor, "get_summary_writer", no_space)
    with deepspeed_silenced(verbose=False), reports_optional():
        TensorBoardMonitor.get_summary_writer(None)
    assert capfd.readouterr().err.startswith("  warning: the files of DeepSpeed's monitors cannot be written")
    assert TensorBoardMonitor.get_summary_writer is no_space


@pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), os.mkfifo], ids=["a file", "a named pipe"])
def test_a_profile_does_not_replace_what_exists(tmp_path, make) -> None:
    make(tmp_path / "profile")
    written = []
    profiler = types.SimpleNamespace(print_model_profile=lambda output_file: written.append(output_file))
    engine = types.SimpleNamespace(flops_profiler=profiler, monitor=types.SimpleNamespace(write_events=None))
    continue_without_reports(engine)
    (tmp_path / "profile.1").write_text("an earlier one")
    for name in ("profile", "new"):
        profiler.print_model_profile(output_file=str(tmp_path / name))
    assert written == [str(tmp_path / "profile.2"), str(tmp_path / "new")]


def test_the_local_rank_under_mpirun_is_that_of_open_mpi(monkeypatch) -> None:
    from deepspeed.comm import comm

    def discovery(distributed_port: int, verbose: bool) -> None:
        os.environ.update(RANK="2", LOCAL_RANK="2", MASTER_PORT=str(distributed_port))

    monkeypatch.setattr(comm, "mpi_discovery", discovery)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    discover_mpi_ranks(29501)
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_PORT")] == ["2", "1", "29501"]


def test_no_reduction_counts_the_devices_of_a_cpu(run_ranks_once, programs) -> None:
    """They are counted before the ranks meet, and once afterwards."""
    words = "--train-iters 1 --batch-size 1 --gas 4 --eval-iters 0 --zero-stage 3".split()
    assert max(run_ranks_once(2, _train_counting, [*_tiny(programs), *words])) <= 2


def _train_counting(words: list[str]) -> int:
    """How often a run asks numactl for the processors of this machine."""
    from deepspeed.utils import numa
    from support.training import pretrain

    asked = []
    numa.get_numa_cores = lambda: asked.append(1) or [[0], [1]]
    code, _ = pretrain(words)
    assert code == 0
    return len(asked)


def _tiny(programs) -> list[str]:
    from support.programs import TINY_MODEL

    return [str(word) for word in (*TINY_MODEL, *programs.data_arguments)]


@pytest.mark.ranks(2)
def test_a_trace_shows_the_collectives_of_deepspeed() -> None:
    """Which keeps its own references to two of torch's functions."""
    from deepspeed import comm

    names: list[str] = []
    with collectives_timed(lambda: 0.0, lambda name, begin, end: names.append(name)):
        comm.all_gather_into_tensor(torch.empty(2), torch.ones(1))
        comm.reduce_scatter_tensor(torch.empty(1), torch.ones(2))
        comm.all_reduce(torch.ones(1))
    assert names == ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]
