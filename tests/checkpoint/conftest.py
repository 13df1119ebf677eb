"""Checkpoints of iteration 3 on several layouts, each saved when a test first needs it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.layouts import layout
from support.training import RankTraining

from megatron.checkpoint.commit import publish

SAVED = 3
SETTINGS = (
    "--train-iters 7 --batch-size 16 --global-batch-size 32 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
).split()
"""More samples than the tiny corpus has, so that a second epoch begins after iteration 5."""

FP8 = "--zero-stage 1 --bf16 --fp8-format hybrid --fp8-recipe rowwise --fp8-min-size 16"


@pytest.fixture(scope="session")
def uninterrupted(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``metrics`` of all 7 iterations on one process, and ``ck``, which points to iteration 3 of it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    words = ("--save", folder / "ck", "--save-interval", str(SAVED), "--metrics-file", folder / "metrics")
    train_in_ranks(1, *SETTINGS, *words)
    publish(folder / "ck", f"global_step{SAVED}", SAVED)
    return folder


@pytest.fixture(scope="session")
def saved_on(
    train_in_ranks: RankTraining, uninterrupted: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``saved_on(layout)``: a checkpoint folder of iteration 3."""
    folders = {"dp1": uninterrupted / "ck"}

    def save(name: str) -> Path:
        if name not in folders:
            processes, flags = layout(name)
            folder = tmp_path_factory.mktemp("saved")
            words = ("--exit-interval", str(SAVED), "--save", folder)
            train_in_ranks(processes, *SETTINGS, *flags.split(), *words)
            folders[name] = folder
        return folders[name]

    return save
