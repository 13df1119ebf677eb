"""One run at a time saves into a folder; whatever ended the previous one, the next one may."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from support.programs import TINY_MODEL, Programs

from megatron.checkpoint import collective_lock, folder_lock
from megatron.checkpoint.folder_lock import LOCK, FolderLock, check_unlocked, displace, owner_of
from megatron.cli import parse_run
from megatron.common.errors import CheckpointError, ConfigError
from megatron.launch.distributed import distributed

HOLD = (
    "import sys, time; from pathlib import Path; from megatron.checkpoint.folder_lock import FolderLock; "
    "FolderLock(Path(sys.argv[1])).take(); print('taken', flush=True); time.sleep(600)"
)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process, which holds the lock of ``tmp_path``."""
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"taken\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_until_the_first_is_killed(
    programs: Programs, tmp_path: Path, owner: subprocess.Popen
) -> None:
    words = ["--train-iters", "1", "--batch-size", "2", "--eval-iters", "0", "--save", tmp_path]
    refused = programs.pretrain(1, *words)
    by = f"process {owner.pid} on {os.uname().nodename}"
    problem = f"--save {tmp_path}: another run ({by}) saves into this folder; end it, or name another folder"
    assert refused.output.splitlines() == [f"pretrain_gpt2.py: error: {problem}"] and refused.returncode == 4
    for attempt in (check_unlocked, lambda folder: FolderLock(folder).take()):
        with pytest.raises(CheckpointError) as refusal:
            attempt(tmp_path)
        assert refusal.value.messages == [problem]
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    check_unlocked(copy)
    (lock := FolderLock(copy)).take()  # at once: the other run saves elsewhere
    lock.release()
    os.kill(owner.pid, signal.SIGKILL)
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not waited for it
    programs.pretrain(1, *words).ok()
    assert (tmp_path / "global_step1").is_dir() and not (tmp_path / LOCK).exists()


def _on_another_host(content: dict) -> dict:
    return {**content, "machine": "another"}


def _before_its_id_was_reused(content: dict) -> dict:
    return {**content, "started": "1"}


STALE = [
    (_on_another_host, 0.2), (_before_its_id_was_reused, 60.0),
    *[(lambda _, text=text: text, 60.0) for text in ("", '{"pid": []}', "[" * 1024)],
]  # fmt: skip
"""What has happened to the lock, and the seconds that one of another host would be waited for."""


@pytest.mark.parametrize(("change", "lease"), STALE)
def test_a_stale_lock_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, lease) -> None:
    monkeypatch.setattr(folder_lock, "LEASE_SECONDS", lease)
    earlier, later = FolderLock(tmp_path), FolderLock(tmp_path)
    earlier.take()
    content = change(json.loads((tmp_path / LOCK).read_text()))
    (tmp_path / LOCK).write_text(content if isinstance(content, str) else json.dumps(content))
    check_unlocked(tmp_path)
    monkeypatch.setattr(folder_lock, "RENEWAL_SECONDS", 0.1)
    start = time.monotonic()
    later.take()
    assert time.monotonic() - start < 30
    later.check()
    with pytest.raises(CheckpointError, match="has taken the folder over"):
        earlier.check()
    earlier.release()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    later.release()
    assert not any(tmp_path.iterdir())


def test_an_owner_on_another_host_that_renews_its_lock_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own clock; only changes of the file count."""
    monkeypatch.setattr(folder_lock, "RENEWAL_SECONDS", 0.1)
    monkeypatch.setattr(folder_lock, "LEASE_SECONDS", 60.0)
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    monkeypatch.setattr(folder_lock, "machine_id", lambda: "another")
    os.utime(tmp_path / LOCK, (0, 0))
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="another run .* saves into this folder"):
        second.take()
    assert time.monotonic() - start < 30
    first.check()
    first.release()


def test_an_owner_writes_over_a_damaged_lock_and_keeps_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(folder_lock, "RENEWAL_SECONDS", 0.5)
    monkeypatch.setattr(folder_lock, "_pause", lambda: 0.05)
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    (tmp_path / LOCK).write_text("garbage")
    with pytest.raises(CheckpointError, match="another run"):
        second.take()
    first.check()
    first.release()


def lock_in_folders_of_ranks(words: list[str], places: str) -> str:
    """The error where ``--save ck`` is another folder for each rank."""
    run = parse_run(words, {**os.environ, "LOCAL_RANK": "0"})  # the first of a host
    with pytest.MonkeyPatch.context() as patch, distributed(run.parallel), pytest.raises(ConfigError) as error:
        patch.setattr(collective_lock, "_LOOKS", 1)
        (place := Path(places) / os.environ["RANK"]).mkdir()
        patch.chdir(place)
        with collective_lock.lock_folder(run):
            pass
    return str(error.value)


def test_a_folder_that_hosts_do_not_share_is_refused_at_the_start(run_ranks, programs: Programs, tmp_path) -> None:
    words = [*TINY_MODEL, *programs.data_arguments, *"--batch-size 2 --train-iters 1 --save ck".split()]
    for message in run_ranks(2, lock_in_folders_of_ranks, words, str(tmp_path)):
        assert message.startswith("--save ck: not the folder of rank 0") and message.endswith("that all hosts share")
    assert not any((tmp_path / "0" / "ck").iterdir()) and not (tmp_path / "1" / "ck").exists()


def test_the_lock_is_taken_again_if_the_user_deletes_it(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.take()
    (tmp_path / LOCK).unlink()
    lock.check()
    assert (tmp_path / LOCK).exists()
    lock.release()


def taken_over(lock: FolderLock, change: Callable[[], None]) -> bool:
    """Whether ``lock`` is taken over once the owner has changed, for which it waits."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.take_over)
        assert wait([waiting], 0.5).not_done
        change()
        return waiting.result(60)


def test_a_standby_takes_over_from_a_killed_owner_only(
    tmp_path: Path, owner: subprocess.Popen, monkeypatch, capfd
) -> None:
    def end_owner() -> None:
        owner.kill()
        owner.wait()

    first, second, third = (FolderLock(tmp_path) for _ in range(3))
    assert taken_over(first, end_owner)
    assert not taken_over(second, first.release) and not (tmp_path / LOCK).exists()
    assert second.take_over(), "no process has it"
    # On another host: as long as it is renewed, and no longer.
    monkeypatch.setattr(folder_lock, "machine_id", lambda: "another")
    monkeypatch.setattr(folder_lock, "LEASE_SECONDS", 2.0)
    assert taken_over(third, lambda: None)
    assert "waiting" not in capfd.readouterr().err, "it has waited for the lease already"
    third.release()


def test_a_displaced_owner_ends_and_the_next_start_saves(tmp_path: Path, monkeypatch) -> None:
    """Of an elastic run: its rank 0 cannot be reached, and may train on, but another one saves from now on."""
    monkeypatch.setattr(folder_lock, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setenv(folder_lock.RUN_VARIABLE, "this run")
    lost: list[str] = []
    first, second = FolderLock(tmp_path, when_lost=lost.append), FolderLock(tmp_path)
    first.take()
    owner = owner_of(tmp_path)
    assert owner is not None and owner.run == "this run"
    displace(tmp_path, replace(owner, token="another"))
    first.check()
    displace(tmp_path, owner)
    with pytest.raises(CheckpointError, match=r"another run \(its elastic agent on .*\) has taken the folder over"):
        first.check()
    start = time.monotonic()
    second.take()
    assert time.monotonic() - start < 5, "without waiting for a lease"
    while not lost:
        time.sleep(0.01)
    second.check()
    for lock in (first, second):
        lock.release()
    assert not any(tmp_path.iterdir())
