"""Packed samples of instruction tuning: every document once in an epoch, whole, apart, and with its own loss mask."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from data.conftest import built

from megatron.cli import parse_run
from megatron.common.errors import DataError, UserError
from megatron.config import DataConfig
from megatron.config.data import loss_mask_prefix
from megatron.data.datasets import check_data, samples_per_epoch
from megatron.data.sft_dataset import SFTDataset, pack

LENGTHS = [1 + 7 * n % 23 for n in range(60)]
DOCUMENTS = [[100 * n + k for k in range(length)] for n, length in enumerate(LENGTHS)]
"""Tokens that encode the document (hundreds) and the position in it; the loss mask is their last bit."""
TRAIN = {"train": 80}


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> DataConfig:
    prefix = write_dataset(DOCUMENTS)
    write_dataset([[token % 2 for token in document] for document in DOCUMENTS], "u1", "data_loss_mask")
    return DataConfig(data_path=(prefix,), seq_length=16, split="1", sft=True)


def test_an_epoch_holds_every_document_once_and_whole(data: DataConfig) -> None:
    samples = built(data, TRAIN).train
    assert isinstance(samples, SFTDataset)
    epochs = [
        [samples[n] for n in range(first, first + samples.samples_per_epoch)]
        for first in (0, samples.samples_per_epoch)
    ]
    for epoch in epochs:
        found = []
        for tokens, segments, labels, mask in epoch:
            padding = segments == segments[-1] if segments[-1] and not mask[-1] and not labels[-1] else segments < 0
            assert not (tokens | labels | mask)[padding].any()
            for segment in np.unique(segments[~padding]):
                inside = segments == segment
                document = [*tokens[inside], labels[inside][-1]]
                assert labels[inside].tolist() == document[1:]
                assert mask[inside].tolist() == [token % 2 for token in document[1:]]
                found.append(document)
        assert sorted(found) == [document[:17] for document in DOCUMENTS if len(document) > 1]
    assert [sample.tolist() for sample in epochs[0]] != [sample.tolist() for sample in epochs[1]]
    assert len(samples) >= 80 and samples.cut_documents == sum(length > 17 for length in LENGTHS)
    assert f"; {samples.cut_documents} longer than a sample" in samples.describe()


def test_iterations_of_some_epochs(data: DataConfig, write_dataset: Callable[..., str]) -> None:
    """Through the command line; the last iteration may go beyond the last epoch."""
    each = samples_per_epoch(data)
    other = write_dataset(DOCUMENTS, name="other")
    write_dataset([[1] * length for length in LENGTHS], "u1", "other_loss_mask")
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --vocab-size 6000 --split 1"
    rest = f"--tokenizer-type NullTokenizer --batch-size 4 --lr 1 --data-path {data.data_path[0]}"
    given = [*sizes.split(), *rest.split()]
    for epochs in (1, 2.5):
        run = parse_run([*given, "--sft", "--epochs", str(epochs)], {})
        assert (run.train.train_iters - 1) * 4 < epochs * each <= run.train.train_iters * 4
        assert run.train.length_flag == "--epochs"
    for words, message in {
        f"--sft --epochs 1 --data-path 1 {data.data_path[0]} 1 {other}": "--epochs is for one data set",
        "--sft --epochs 1 --train-iters 2": "exclude each other",
        "--epochs 1": "--epochs needs --sft",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_run([*given, *words.split()], {})


def test_packing_is_best_fit_decreasing() -> None:
    members, starts = pack(np.array([9, 6, 5, 4, 1, 1]), 10)
    assert [members[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)] == [[0, 4], [1, 3], [2, 5]]


def test_a_data_set_without_its_loss_mask_is_an_error(data: DataConfig, write_dataset: Callable[..., str]) -> None:
    other = replace(data, data_path=(write_dataset(DOCUMENTS, name="other"),))
    with pytest.raises(DataError, match=r"no data set at .*other_loss_mask.*--format messages"):
        check_data(other, TRAIN)
    write_dataset(DOCUMENTS[1:], name="other_loss_mask")
    with pytest.raises(DataError, match="documents have other lengths"):
        check_data(other, TRAIN)
    write_dataset([[2] * len(tokens) for tokens in DOCUMENTS], name="other_loss_mask")
    with pytest.raises(DataError, match="other_loss_mask.bin holds 2, and should hold 0 and 1"):
        check_data(other, TRAIN)
    assert other.contents == ((other.data_path[0], loss_mask_prefix(other.data_path[0])),)
    with pytest.raises(DataError, match="holds token 2500 in document 25 at offset 0, but the vocabulary ends at 5"):
        built(data, TRAIN, vocab_size=6).train[0]


def test_answers_after_the_cut_are_counted_or_an_error(data: DataConfig, write_dataset: Callable[..., str]) -> None:
    documents = [[1] * 17, [2] * 18, [3] * 20]
    prefix = write_dataset(documents, name="late")
    masks = [[0] * 17, [0] * 17 + [1], [0] * 17 + [1] * 3]
    write_dataset(masks, "u1", "late_loss_mask")
    late = replace(data, data_path=(prefix,))
    with pytest.raises(DataError, match="no token that counts is among the first 17 of a document: raise --seq-length"):
        check_data(late, TRAIN)
    check_data(replace(late, seq_length=17), TRAIN)
    samples = built(replace(late, seq_length=17), TRAIN).train
    assert samples.describe().endswith("; 1 longer than a sample, cut at the end")
    write_dataset([[0] * 16 + [1], *masks[1:]], "u1", "late_loss_mask")
    samples = built(late, TRAIN).train
    assert samples.describe().endswith("; 2 of no effect, as their answers come after the cut")
