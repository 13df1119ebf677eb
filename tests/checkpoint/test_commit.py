"""Adding and removing checkpoints on disk: interrupted at any step, no earlier checkpoint is lost."""

import errno
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import commit, tracker
from megatron.checkpoint.commit import begin_tag, commit_tag
from megatron.checkpoint.files import NewFile, Record, record_of, write_text, xxh128_of
from megatron.checkpoint.manifest import _render, check_content, read_manifest
from megatron.checkpoint.tracker import newest
from megatron.common.errors import CheckpointError
from megatron.config import CheckpointConfig

KEEP_ALL = CheckpointConfig()
ONE_PROCESS = {
    "--model-parallel-size": 1, "--pipe-parallel-size": 0, "--ds-sequence-parallel-size": 1, "data-parallel size": 1,
    "--zero-stage": 0,
}  # fmt: skip
KEEP_ONE = CheckpointConfig(keep_last=1)
CHANGES = ("open", "mkdir", "rmdir", "unlink", "rename", "replace", "fsync")
"""Functions of ``os`` that change what is on the disk."""


def save(folder: Path, iteration: int, text: str = "weights", config: CheckpointConfig = KEEP_ALL) -> None:
    """What the ranks do in a save, with text instead of tensors."""
    tag = tracker.tag_name(iteration)
    place = begin_tag(folder, tag)
    records = {name: write_text(place / name, f"{text} of {name}") for name in ("first.pt", "second.pt")}
    description = {"iteration": iteration, "layout": ONE_PROCESS, "config": {"model": {}}}
    records["run.json"] = write_text(place / "run.json", json.dumps(description))
    commit_tag(folder, iteration, records, config)


def whole_iteration(folder: Path) -> int:
    """Iteration of the newest checkpoint, whose files are verified."""
    saved = newest(folder)
    for name, record in read_manifest(saved.path).items():
        check_content(saved.path / name, record)
    return saved.iteration


def tags_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def wrap_changes(before: Callable[[str, tuple], None]) -> None:
    """Have ``before(name, arguments)`` called before every change. For a process that ends soon."""

    def wrapped(name: str, original: Callable) -> Callable:
        def change(*arguments: Any, **options: Any) -> Any:
            before(name, arguments)
            return original(*arguments, **options)

        return change

    for name in CHANGES:
        setattr(os, name, wrapped(name, getattr(os, name)))


def in_child(step: Callable[[], None]) -> int:
    """The exit code of a process that takes ``step``."""
    if (child := os.fork()) == 0:
        try:
            step()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def save_killed_at(change: int, folder: Path, iteration: int) -> int:
    """The exit code of a save that is killed just before its n-th change; 0 if there are fewer."""
    count = 0

    def die(name: str, arguments: tuple) -> None:
        nonlocal count
        count += 1
        if count > change:
            os._exit(9)

    def step() -> None:
        wrap_changes(die)
        save(folder, iteration, "new weights", KEEP_ONE)

    return in_child(step)


@pytest.mark.parametrize("again", [False, True], ids=["a new tag", "the only tag, saved again"])
def test_killed_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, again: bool) -> None:
    """Rank 0 dies between any two system calls of a save, the removal of the old tag included."""
    save(tmp_path / "before", 1)
    iteration = 1 if again else 2
    found, change, ended = [], 0, 9
    while ended == 9:
        folder = tmp_path / f"killed{change}"
        shutil.copytree(tmp_path / "before", folder)
        ended = save_killed_at(change, folder, iteration)
        found.append(whole_iteration(folder))
        save(folder, iteration)
        assert whole_iteration(folder) == iteration
        save(folder, 3, config=KEEP_ONE)
        assert whole_iteration(folder) == 3 and tags_in(folder) == ["global_step3"]
        change += 1
    assert ended == 0 and change > 25
    assert found == sorted(found) and found[0] == 1 and found[-1] == iteration


def test_the_first_save_killed_is_no_checkpoint(tmp_path: Path) -> None:
    assert save_killed_at(6, tmp_path / "ck", 1) == 9
    assert tags_in(tmp_path / "ck") == ["global_step1.partial"]
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        newest(tmp_path / "ck")


def test_a_file_that_another_host_has_not_written_here_is_missed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = begin_tag(tmp_path, "global_step2")
    records = {name: write_text(place / name, "weights") for name in ("first.pt", "second.pt")}
    (place / "second.pt").unlink()
    with pytest.raises(CheckpointError, match="second.pt is missing"):
        commit_tag(tmp_path, 2, records, KEEP_ONE)
    assert whole_iteration(tmp_path) == 1


def test_everything_is_on_disk_before_it_is_named(tmp_path: Path) -> None:
    """The order of changes that survives a loss of power: content, then names in the folder, then the next name."""
    changes = tmp_path / "changes"

    def note(name: str, arguments: tuple) -> None:
        if name in ("fsync", "rename", "replace"):
            path = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else str(arguments[1])
            with open(changes, "a") as file:
                file.write(f"{name} {Path(path).name}\n")

    def step() -> None:
        wrap_changes(note)
        save(tmp_path / "ck", 1)

    assert in_child(step) == 0
    lines = changes.read_text().splitlines()
    lines = lines[lines.index("fsync first.pt") :]
    for number, line in enumerate(lines):
        if line.startswith("fsync .latest"):
            lines[number] = "fsync .latest"
    assert lines == [
        "fsync first.pt",
        "fsync second.pt",
        "fsync run.json",
        "fsync global_step1.partial",
        "fsync manifest.json",
        "fsync global_step1.partial",
        "rename global_step1",
        "fsync ck",
        "fsync .latest",
        "replace latest",
        "fsync ck",
        "fsync .latest",
        "replace latest_checkpointed_iteration.txt",
        "fsync ck",
    ]


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (CheckpointConfig(), [1, 2, 3, 4, 5, 6, 7]),
        (CheckpointConfig(keep_last=1), [7]),
        (CheckpointConfig(keep_last=2), [6, 7]),
        (CheckpointConfig(keep_last=2, keep_every=3), [3, 6, 7]),
    ],
)
def test_retention(tmp_path: Path, config: CheckpointConfig, left: list[int]) -> None:
    (tmp_path / "global_step0").mkdir()  # without a manifest, so it is not ours to remove
    for iteration in range(1, 8):
        save(tmp_path, iteration, config=config)
    assert tags_in(tmp_path) == ["global_step0", *(f"global_step{iteration}" for iteration in left)]


def test_a_run_that_rewinds_keeps_what_it_saves(tmp_path: Path) -> None:
    """Later checkpoints, from before the rewind, do not count as newer ones."""
    for iteration in (1, 2, 8, 9):
        save(tmp_path, iteration)
    save(tmp_path, 3, config=KEEP_ONE)
    assert tags_in(tmp_path) == ["global_step3", "global_step8", "global_step9"]
    assert whole_iteration(tmp_path) == 3


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(tmp_path: Path, monkeypatch, capsys) -> None:
    """As on NFS, where a file that a process reads gets another name in its folder."""

    def rmtree(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch:
        patch.setattr(commit.shutil, "rmtree", rmtree)
        for iteration in (1, 2, 3):
            save(tmp_path, iteration, config=KEEP_ONE)
    assert whole_iteration(tmp_path) == 3
    assert tags_in(tmp_path) == ["global_step1.partial", "global_step2.partial", "global_step3"]
    assert "global_step1.partial cannot be removed (Directory not empty)" in capsys.readouterr().err
    save(tmp_path, 4, config=KEEP_ONE)
    assert tags_in(tmp_path) == ["global_step4"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "latest").symlink_to(outside / "file")
    (folder / "global_step1.partial").symlink_to(outside)
    (folder / "global_step1").symlink_to(outside)
    save(folder, 1)
    assert whole_iteration(folder) == 1 and tags_in(folder) == ["global_step1"]
    assert [path.name for path in outside.iterdir()] == ["file"] and (outside / "file").read_text() == "mine"
    assert not (folder / "latest").is_symlink()
    with pytest.raises(FileExistsError):
        (folder / "file").symlink_to(outside / "file")
        write_text(folder / "file", "theirs")


def test_a_flipped_bit_in_any_block_is_found(tmp_path: Path) -> None:
    """Also in checkpoints of earlier versions, which have no xxh128; and blocks that are exchanged."""
    path, block = tmp_path / "large.pt", 1 << 20
    content = random.Random(1).randbytes(3 * block + 5)
    file = NewFile(path)
    for begin, end in ((0, 7), (7, 2 * block + 7), (2 * block + 7, len(content))):
        file.write(memoryview(content)[begin:end])
    record = file.close()
    assert path.read_bytes() == content and record == record_of(path)
    changes = [content[block : 2 * block] + content[:block] + content[2 * block :]]
    for position in (0, block - 1, block, 2 * block + 100, len(content) - 1):
        changes.append(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    for known in (record, Record(record.size, hashlib.sha256(content).hexdigest())):
        path.write_bytes(content)
        check_content(path, known)
        for changed in changes:
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=f"{path} is damaged"):
                check_content(path, known)


def test_a_manifest_of_another_form(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tag := tmp_path / "global_step1").joinpath("manifest.json").unlink()
    for record in (Record("4"), Record(None), Record(True), Record(4, 5), Record(4, xxh128=["x"])):  # type: ignore[arg-type]
        (tag / "manifest.json").write_text(_render({"run.json": record}))
        with pytest.raises(CheckpointError, match="manifest.json is damaged"):
            read_manifest(tag)


@pytest.mark.parametrize("name", ["../other/run.json", "rank0/../../run.json", "/etc/passwd"])
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(_render({name: Record(4, xxh128="0" * 32)}))
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        read_manifest(tmp_path)


def test_a_disk_that_returns_less_than_was_asked_for_damages_no_file(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "weights.pt"
    file.write_bytes(bytes(range(256)) * 9000)  # two blocks and a part of one
    expected, pread = xxh128_of(file), os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 300_000), offset))
    assert xxh128_of(file) == expected


def test_a_checkpoint_that_a_run_has_removed_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"global_step2 is gone"):
        tracker.tag_at(tmp_path / "global_step2")
