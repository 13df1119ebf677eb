"""Checkpoints that an earlier version of the project saved are loaded, converted and inspected by this one.

They are in ``fixtures/``, with the losses of the uninterrupted runs.
"""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import Programs, read_metrics
from support.training import pretrain

FIXTURES = Path(__file__).parent / "fixtures"
SETTINGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    " --num-workers 0 --log-interval 1 --lr 1e-2 --lr-decay-style cosine --min-lr 1e-4 --warmup 0.2 --split 8,1,1"
    " --train-iters 8 --batch-size 4 --global-batch-size 16 --eval-iters 0 --tokenizer-type WhitespaceTokenizer"
).split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
SUMS_IN_FP32 = f"{NO_DROPOUT} --bf16 --grad-accum-dtype fp32"
TENSOR_AND_PIPELINE = f"{NO_DROPOUT} --model-parallel-size 2 --pipe-parallel-size 2 --zero-stage 1"
RESUMED = [
    ("pipeline", 4, TENSOR_AND_PIPELINE),
    ("pipeline", 1, NO_DROPOUT),
    ("bf16", 2, SUMS_IN_FP32),
    ("bf16", 1, SUMS_IN_FP32),
    ("zero3", 2, "--zero-stage 3"),  # with dropout: the random streams of both ranks continue
]
"""Name of a checkpoint, and the processes and flags of a run that resumes it."""


@pytest.fixture
def earlier(tmp_path: Path) -> Callable[[str], Path]:
    """``earlier(name)``: a copy of a checkpoint folder; the data set and the vocabulary are next to it."""
    for file in ("tiny_text_document.bin", "tiny_text_document.idx", "vocab.json"):
        shutil.copy(FIXTURES / file, tmp_path)

    def unpack(name: str) -> Path:
        with tarfile.open(FIXTURES / f"{name}.tar.gz") as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python 3.11.0 to 3.11.3 lack
            archive.extractall(tmp_path / name)
        return tmp_path / name

    return unpack


@pytest.mark.parametrize(("name", "processes", "flags"), RESUMED)
def test_run_resumes_an_earlier_checkpoint(
    earlier, run_ranks_once, tmp_path: Path, name: str, processes: int, flags: str
):
    data = ("--data-path", tmp_path / "tiny_text_document", "--vocab-file", tmp_path / "vocab.json")
    files = ("--load", earlier(name), "--metrics-file", tmp_path / "metrics")
    words = [str(word) for word in (*SETTINGS, *flags.split(), *data, *files)]
    outputs = run_ranks_once(processes, pretrain, words)
    assert all(code == 0 for code, _ in outputs), outputs
    expected, resumed = read_metrics(FIXTURES / f"{name}.jsonl"), read_metrics(tmp_path / "metrics")
    for key in ("iteration", "consumed_samples", "learning_rate"):
        assert [line[key] for line in resumed] == [line[key] for line in expected]
    for key in ("lm_loss", "grad_norm"):
        bound = 5e-3 if name == "bf16" else 1e-5  # ranks added up bf16 gradients in bf16
        assert [line[key] for line in resumed] == pytest.approx([line[key] for line in expected], rel=bound), key


@pytest.mark.parametrize("name", ["pipeline", "zero3"])
def test_tools_read_an_earlier_checkpoint(earlier, programs: Programs, tmp_path: Path, name: str):
    folder, output = earlier(name), tmp_path / "hf"
    report = programs.warm(1, "tools/inspect_checkpoint.py", folder, "--json").ok().output
    report = json.loads(report[report.index("{") :])
    assert report["iteration"] == 4 and report["layout"]["--zero-stage"] == (1 if name == "pipeline" else 3)
    assert sum(parameter["shape"] == [62, 16] for parameter in report["parameters"]) == 1, "the vocabulary"
    programs.warm(1, "tools/convert_checkpoint.py", "to-hf", folder, "--output", output).ok()
    assert json.loads((output / "config.json").read_text())["n_layer"] == 2
