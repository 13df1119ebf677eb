"""Converters do not write into a folder while a run saves into it."""

import json
from pathlib import Path

import pytest
from support.command_lines import parse
from support.programs import Programs

from megatron.checkpoint.files import MANIFEST, record_of, write_manifest
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.run_file import RUN_FILE, describe
from megatron.checkpoint.tracker import LATEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint, as far as it is read before its weights."""
    tag = tmp_path / "ck" / "global_step6"
    tag.mkdir(parents=True)
    (tag / RUN_FILE).write_text(json.dumps(describe(parse(), 6)))
    write_manifest(tag, {RUN_FILE: record_of(tag / RUN_FILE)})
    (tag.parent / LATEST).write_text(tag.name)
    return tag.parent


@pytest.mark.parametrize("words", ["to-universal {}", "merge {} --output {}/model.safetensors"])
def test_a_folder_in_use_is_refused(words: str, folder: Path, programs: Programs) -> None:
    before = sorted(folder.rglob("*"))
    lock = FolderLock(folder)
    lock.take()
    try:
        command = [word.format(folder) for word in words.split()]
        finished = programs.warm(1, "tools/convert_checkpoint.py", *command)
    finally:
        lock.release()
    assert finished.returncode == 4 and "saves into this folder" in finished.output, finished
    assert len(finished.output.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before and (folder / "global_step6" / MANIFEST).exists()
