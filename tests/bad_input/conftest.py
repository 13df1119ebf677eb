"""A folder with all files of a run, for a test to damage."""

import shutil
from pathlib import Path

import pytest
from support.programs import Programs


@pytest.fixture(scope="session")
def _whole(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data set, its vocabulary, and checkpoints of iterations 1 and 2 in ``ck``."""
    folder = tmp_path_factory.mktemp("whole")
    two_saves = "--batch-size 2 --train-iters 4 --exit-interval 2 --save-interval 1 --eval-iters 1".split()
    programs.pretrain(1, *two_saves, "--save", folder / "ck").ok()
    for name in ("tiny_text_document.bin", "tiny_text_document.idx", "vocab.json"):
        shutil.copy2(programs.folder / name, folder)
    return folder


@pytest.fixture
def place(_whole: Path, tmp_path: Path) -> Path:
    """A copy of that folder, in which the test starts its run."""
    return shutil.copytree(_whole, tmp_path / "place")
