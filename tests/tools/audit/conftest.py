"""A run on a blend that was stopped, lost a checkpoint, and resumed with other ranks."""

from pathlib import Path
from typing import NamedTuple

import pytest
from support.programs import Programs
from support.training import RankTraining

SETTINGS = (
    "--train-iters 6 --batch-size 1 --global-batch-size 4 --eval-iters 1 --eval-interval 3"
    " --attention-dropout 0 --hidden-dropout 0"
).split()


class Restarted(NamedTuple):
    """Files of the run."""

    checkpoints: Path
    metrics: Path
    blend: list[str]


@pytest.fixture(scope="session")
def restarted(train_in_ranks: RankTraining, programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    """Two ranks make iterations 1 to 4; the checkpoint of 4 is broken; one rank resumes after 2."""
    folder = tmp_path_factory.mktemp("restarted")
    lines = (programs.folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "half.jsonl").write_text("".join(reversed(lines[:100])))
    programs.warm(
        1, "tools/preprocess_data.py", "--input", folder / "half.jsonl", "--tokenizer-type", "WhitespaceTokenizer",
        "--vocab-file", programs.folder / "vocab.json", "--append-eod", "--output-prefix", folder / "half",
    ).ok()  # fmt: skip
    blend = ["--data-path", "0.7", programs.data_arguments[1], "0.3", str(folder / "half_text_document")]
    checkpoints, metrics = folder / "ck", folder / "metrics.jsonl"
    saves = ("--save", checkpoints, "--load", checkpoints, "--save-interval", "2", "--metrics-file", metrics)
    train_in_ranks(2, *SETTINGS, *blend, *saves, "--exit-interval", "4")
    next((checkpoints / "global_step4").glob("*.pt")).unlink()
    assert "resuming after iteration 2" in train_in_ranks(1, *SETTINGS, *blend, *saves)
    return Restarted(checkpoints, metrics, blend)
