"""Saving in the foreground and in the background, and saves that fail."""

import errno
import os
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.programs import TINY_MODEL, Finished, Programs, read_metrics
from support.training import RankTraining, pretrain
from torch import nn

from megatron.checkpoint.engine_files import EngineFiles, bytes_of, in_host_memory
from megatron.checkpoint.files import disk_errors
from megatron.checkpoint.tensor_files import write_file
from megatron.cli import parse_run
from megatron.common.errors import ResourceError

SETTINGS = "--batch-size 2 --gas 2 --eval-iters 0 --save-interval 1".split()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_disk_without_inodes_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = SimpleNamespace(f_files=100, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    for place in (tmp_path, tmp_path / "missing" / "folder"):
        with pytest.raises(ResourceError, match="no inodes left"), disk_errors(place, "the checkpoint", 0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("words", [[], ["--async-save"]], ids=["", "in the background"])
def test_a_slow_rank_delays_the_checkpoint(programs: Programs, tmp_path: Path, words: list[str]) -> None:
    """Rank 1 writes nothing of the second checkpoint until it is released; all other files are there."""
    folder, go, metrics = tmp_path / "ck", tmp_path / "go", tmp_path / "metrics"
    partial = folder / "global_step2.partial"
    command = [*SETTINGS, "--train-iters", "4", "--pipe-parallel-size", "2"]
    command += ["--zero-stage", "1", "--save", str(folder), "--metrics-file", str(metrics), *words]
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(programs.faulty, 2, f"write 1 {go}", *command)
        try:
            # Training continues as far as the next save, which has to wait for this one.
            iterations = 3 if words else 2
            wait_for(
                lambda: (
                    ended.done()
                    or (partial / "mp_rank_00_model_states.pt").exists()
                    and metrics.read_text().count("\n") >= iterations
                )
            )
            assert not ended.done(), ended.result().output
            time.sleep(1)  # in which nothing else may happen
            names = {path.name for path in partial.iterdir()}
            assert "mp_rank_00_model_states.pt" in names and "mp_rank_01_model_states.pt" not in names
            assert (folder / "latest").read_text() == "global_step1" and not (folder / "global_step2").exists()
            assert len(read_metrics(metrics)) == iterations
        finally:
            go.touch()
        ended.result().ok()
    assert (folder / "latest").read_text() == "global_step4" and len(read_metrics(metrics)) == 4
    assert sorted(path.name for path in folder.glob("global*")) == [f"global_step{step}" for step in (1, 2, 3, 4)]


def test_saving_in_the_background_saves_the_same(train_in_ranks: RankTraining, tmp_path: Path) -> None:
    """It has the state at the time of the save, though training continues meanwhile; and it can be loaded."""
    layout = "--model-parallel-size 2 --zero-stage 2 --train-iters 4".split()
    for words in ([], ["--async-save", "--keep-last", "3"]):
        folder = tmp_path / ("background" if words else "at once")
        train_in_ranks(2, *SETTINGS, *layout, "--save", folder, *words)
    assert not (tmp_path / "background" / "global_step1").exists()
    for step in (2, 3, 4):
        for file in sorted((tmp_path / "at once" / f"global_step{step}").glob("*optim_states.pt")):
            other = tmp_path / "background" / file.parent.name / file.name
            ours, theirs = (
                torch.load(path, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
                for path in (file, other)
            )
            assert all(map(torch.equal, ours, theirs))
    again = [*layout[:-2], *f"--load {tmp_path}/background --train-iters 5 --override --exit-interval 1".split()]
    assert "resuming after iteration 4" in train_in_ranks(2, *SETTINGS[:-2], *again)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_is_detected_before_writing(programs: Programs, small_disk: Path) -> None:
    """There is disk space for one checkpoint, not for two."""
    ended = programs.pretrain(1, *SETTINGS, "--train-iters", "3", "--save", small_disk)
    assert ended.returncode == 7
    (line,) = _errors(ended)
    assert line.startswith(f"--save {small_disk}: the checkpoint of iteration 2 needs ")
    assert " bytes, and the disk has " in line and line.endswith(
        " free: free some space, keep fewer checkpoints with --keep-last, or name another folder"
    )
    assert (small_disk / "latest").read_text() == "global_step1"
    assert [path.name for path in small_disk.glob("global*")] == ["global_step1"]
    words = ("tools/convert_checkpoint.py", "reshard", small_disk, "--output", output := small_disk / "out")
    ended = programs.warm(1, *words)
    line = ended.output.splitlines()[-1]
    assert ended.returncode == 7 and "--output" in line and "--save" not in line and "--keep-last" not in line, line
    assert not output.exists()


@pytest.mark.parametrize("words", [[], ["--async-save", "--on-save-error", "continue"]], ids=["stop", "continue"])
def test_a_disk_that_becomes_full(programs: Programs, tmp_path: Path, words: list[str]) -> None:
    """The optimizer's file exceeds the limit on file sizes, so the error is in the middle of it."""
    folder, metrics = tmp_path / "ck", tmp_path / "metrics"
    command = [*SETTINGS, "--train-iters", "3", "--save", folder, "--metrics-file", metrics, *words]
    ended = programs.faulty(1, "files 300000", *command)
    assert ended.returncode == 7 and "Traceback" not in ended.output
    failed = 3 if words else 1  # the last save is the one that the run ends with
    (line,) = _errors(ended)
    assert line.startswith(f"--save {folder}: the checkpoint of iteration {failed} cannot be written (")
    assert "File too large): raise ulimit -f" in line and " free" not in line
    assert [entry["iteration"] for entry in read_metrics(metrics)] == list(range(1, failed + 1))
    assert ended.output.count("; training continues\n") == (3 if words else 0)
    assert sorted(path.name for path in folder.iterdir()) == ["ds_config.json", "run.yaml"]
    kept = parse_run(["--config", str(folder / "run.yaml")], {})
    assert kept == parse_run([*TINY_MODEL, *programs.data_arguments, *map(str, command)], {}) and kept.settings


def _errors(ended: Finished) -> list[str]:
    prefix = "pretrain_gpt2.py: error: "
    return [line.removeprefix(prefix) for line in ended.output.splitlines() if line.startswith(prefix)]


def test_copies_share_nothing_with_the_state() -> None:
    storage = torch.arange(10.0)
    state = {"whole": storage, "part": storage[2:4], "shapes": [torch.Size([2, 3])], "kept": {"deep": ({1: storage},)}}
    copy = in_host_memory(state)
    assert bytes_of(state) == 40 and bytes_of(copy) == 40 + 8 + 40
    storage.zero_()
    state["shapes"].clear()
    assert copy["whole"].tolist() == list(range(10)) and copy["part"].tolist() == [2, 3]
    assert copy["kept"]["deep"][0][1].tolist() == list(range(10))
    assert copy["shapes"] == [torch.Size([2, 3])] and isinstance(copy["shapes"][0], torch.Size)


def test_copies_equal_tensors_of_any_order_and_type() -> None:
    table = torch.arange(12.0).view(3, 4)
    state = {
        "turned": table.t(), "column": table[:, 1], "of a half": torch.arange(9.0).bfloat16()[2:7],
        "repeated": torch.ones(1).expand(4), "conjugate": torch.tensor([1 + 2j]).conj(),
        "number": torch.tensor(3), "nothing": torch.zeros(0, 2), "trained": nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    copies = in_host_memory(state)
    again = in_host_memory(state, [torch.full_like(copy, 7) for copy in copies.values()])
    for name, tensor in state.items():
        for copy in (copies[name], again[name]):
            assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype and not copy.requires_grad, name
    assert copies["turned"].stride() == (1, 4)


def test_copies_use_the_memory_of_earlier_ones() -> None:
    used = [torch.zeros(2, 3), torch.zeros(4), torch.zeros(5, dtype=torch.bfloat16)]
    state = {"same": torch.ones(2, 3), "of another shape": torch.ones(5), "of another type": torch.ones(5)}
    copy = in_host_memory(state, used)
    assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
    assert copy["same"] is used[0] and not any(tensor.any() for tensor in used[1:])


def test_other_programs_can_read_the_files(tmp_path: Path) -> None:
    """And a tensor that is a small part of its storage is saved without the rest."""
    storage = torch.arange(600_000.0)
    (files := EngineFiles()).save({"part": storage[5:9], "text": "ü"}, str(tmp_path / "part.pt"))
    ((path, content),) = files.take()
    assert write_file(path, content).size == path.stat().st_size < 10_000
    assert zipfile.ZipFile(path).testzip() is None
    assert torch.load(path, weights_only=True)["part"].tolist() == [5, 6, 7, 8]


def with_a_writer_that_fails(words: list[str]) -> str:
    """The error that ends a run whose files cannot be written for a reason that is not the disk's."""
    from megatron.checkpoint import tensor_files
    from megatron.common.errors import CheckpointError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(tensor_files, "write_file", lambda path, state: 1 // 0)
        pretrain(words)
    return str(caught.value)


def test_an_error_of_the_writer_names_rank_and_cause(run_ranks, programs: Programs, tmp_path: Path) -> None:
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, "--train-iters", "1", "--save", str(tmp_path)]
    (message,) = run_ranks(1, with_a_writer_that_fails, words)
    assert message == (
        f"--save {tmp_path}: the checkpoint of iteration 1 cannot be written: rank 0 ended with ZeroDivisionError: "
        "integer division or modulo by zero; earlier checkpoints are not affected"
    )


def test_what_deepspeed_keeps_does_not_depend_on_the_file(tmp_path: Path) -> None:
    """Weights are read from it when they are copied; the optimizer's tensors become those of the run."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"weight": torch.ones(1000)}, "optimizer": {"state": {0: torch.ones(1000)}}}, path)
    content = EngineFiles().load(str(path))
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert content["optimizer"]["state"][0].all() and not content["module"]["weight"].any()
