"""Checkpoints of iteration 3 on several layouts, each saved when a test first needs it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.training import RankTraining

from megatron.checkpoint.tracker import publish

SAVED = 3
SETTINGS = (
    "--train-iters 8 --batch-size 8 --global-batch-size 32 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
).split()
"""More samples than the tiny corpus has, so that a second epoch begins after iteration 5."""

FP8 = "--zero-stage 1 --bf16 --fp8-format hybrid --fp8-recipe rowwise --fp8-min-size 16"
LAYOUTS = {
    "one": (1, ""),
    "one-zero3-offload": (1, "--zero-stage 3 --offload-optimizer cpu --offload-param cpu"),
    "dp2-zero1-offload": (2, "--zero-stage 1 --offload-optimizer cpu"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2-zero1": (2, "--model-parallel-size 2 --zero-stage 1"),
    "tp2-fp8": (2, f"--model-parallel-size 2 --sequence-parallel {FP8}"),
    "tp4": (4, "--model-parallel-size 4"),
    "pp2-dualpipev": (2, "--pipe-parallel-size 2 --pipeline-schedule dualpipev"),
    "tp2-pp2-zero1": (4, "--model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1"),
    "pp1-cp2-zero1": (2, "--pipe-parallel-size 1 --context-parallel-size 2 --zero-stage 1"),
    "ulysses2-zero2-round-robin": (2, "--ds-sequence-parallel-size 2 --zero-stage 2 --zero-round-robin-gradients"),
}
"""Name of a layout, its processes and its flags."""


@pytest.fixture(scope="session")
def uninterrupted(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``metrics`` of all 8 iterations on one process, and ``ck``, which points to iteration 3 of it."""
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
    folders = {"one": uninterrupted / "ck"}

    def save(layout: str) -> Path:
        if layout not in folders:
            processes, flags = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("saved")
            words = ("--exit-interval", str(SAVED), "--save", folder)
            train_in_ranks(processes, *SETTINGS, *flags.split(), *words)
            folders[layout] = folder
        return folders[layout]

    return save
