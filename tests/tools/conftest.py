"""A checkpoint that several tools are tried on."""

from pathlib import Path

import pytest
from support.programs import Programs


@pytest.fixture(scope="session")
def trained(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, from a few iterations at tensor parallel 2 x pipeline 2, ZeRO 1. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    settings = "--train-iters 3 --batch-size 4 --gas 1 --eval-iters 0".split()
    layout = "--model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1".split()
    programs.pretrain(4, *settings, *layout, "--save", folder).ok()
    return folder


@pytest.fixture(scope="session")
def merged(programs: Programs, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``trained`` in one file, as tools/convert_checkpoint.py brings them together."""
    file = tmp_path_factory.mktemp("merged") / "one.safetensors"
    programs.python("tools/convert_checkpoint.py", "merge", trained, "--output", file).ok()
    return file
