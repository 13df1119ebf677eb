"""Mock data: each sample follows from the seed, the split and its index; runs on them agree and resume exactly."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from data.conftest import built
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.checkpoint.commit import publish
from megatron.config import DataConfig
from megatron.data.datasets import Datasets
from megatron.tokenizer import build_tokenizer


def datasets(masked_lm: bool, *, samples: int = 80, seed: int = 1234) -> Datasets:
    data = DataConfig(mock_data=True, seq_length=24, tokenizer_type="NullTokenizer", vocab_size=50)
    return built(data, {"train": samples, "valid": 24, "test": 8}, seed=seed, masked_lm=masked_lm)


@pytest.mark.parametrize("masked_lm", [False, True])
def test_a_sample_depends_on_seed_split_and_index_alone(masked_lm: bool) -> None:
    of_run = datasets(masked_lm)
    assert (len(of_run.train), len(of_run.valid), len(of_run.test)) == (80, 24, 8)
    taken = of_run.train.take([7, 3, 79])
    assert taken.dtype == np.int64 and taken.shape == (3, 3, 24) if masked_lm else (3, 25)
    longer = datasets(masked_lm, samples=8000)
    assert all((longer.train[index] == sample).all() for index, sample in zip((7, 3, 79), taken, strict=True))
    others = (of_run.train[4], of_run.valid[3], of_run.test[3], datasets(masked_lm, seed=1).train[3])
    assert not any((other == of_run.train[3]).all() for other in others)
    with pytest.raises(IndexError):
        of_run.train.take([80])


def test_documents_count_and_end() -> None:
    rows = datasets(False).train.take(range(80))
    assert rows.min() >= 0 and rows.max() == 49
    now, after = rows[:, :-1], rows[:, 1:]
    inside = (now != 49) & (after != 49)
    assert ((after - now - 1)[inside] % 49 == 0).all()
    assert 1 < (rows == 49).sum(1).mean() < 5


def test_spans_of_a_pair_continue_each_other_or_are_swapped() -> None:
    rows, tokenizer = datasets(True).train.take(range(80)), build_tokenizer("NullTokenizer", None, None, 50)
    assert (rows[:, 0, 0] == tokenizer.cls).all() and 20 < rows[:, 2, 0].sum() < 60
    for tokens, types, labels in rows:
        whole = np.where(labels >= 0, labels, tokens)
        a, b = (whole[1:][types[1:] == kind][:-1] for kind in (0, 1))
        run = np.concatenate([b, a] if labels[0] else [a, b])
        assert (np.diff(run) % 46 == 1).all(), "46 tokens are not special"
        assert (whole[types == -1] == tokenizer.pad).all()
        assert 0 < (labels[1:] >= 0).sum() <= 4


def train(programs: Programs, processes: int, program: str, *words: str | Path) -> str:
    common = "--mock-data --train-iters 4 --lr-decay-iters 4 --batch-size 2 --global-batch-size 4 --eval-iters 1"
    common += " --attention-dropout 0 --hidden-dropout 0"
    return programs.warm(processes, program, *TINY_MODEL, *common.split(), *words).ok().output


def test_a_run_resumes_exactly(programs: Programs, tmp_path: Path) -> None:
    one, resumed, folder = (tmp_path / name for name in ("one", "resumed", "checkpoint"))
    size = ["--vocab-size", "90"]
    output = train(
        programs, 1, "pretrain_gpt2.py", *size, "--metrics-file", one, "--save", folder, "--save-interval", "2"
    )
    assert "mock data, split 969, 30, 1" in output and "vocabulary 90 padded to 128" in output
    shutil.rmtree(folder / "global_step4")
    publish(folder, "global_step2", 2)
    train(programs, 2, "pretrain_gpt2.py", *size, "--load", folder, "--metrics-file", resumed)
    losses, found = ([line["lm_loss"] for line in read_metrics(path) if "lm_loss" in line] for path in (one, resumed))
    assert len(losses) == 4 and read_metrics(one)[-1]["test_loss"] > 0
    assert found == pytest.approx(losses[2:], rel=1e-5)
    other = programs.warm(
        1, "pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, "--load", folder, "--train-iters", "4",
        "--batch-size", "4",
    )  # fmt: skip
    assert other.returncode == 4 and "but mock data in" in other.output
    audit = programs.warm(1, "tools/audit_data.py", "batch", "--load", folder, "--iteration", "1")
    assert audit.returncode == 2 and "was trained on --mock-data, which has no documents to list" in audit.output
