"""Samples compared with the token stream they are cut from; errors of a data set that is too small."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data.conftest import DOCUMENTS, SAMPLES, built

from megatron.common.errors import DataError, ResourceError
from megatron.config import DataConfig
from megatron.data import map_cache
from megatron.data.datasets import check_data
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.tools.audit import samples as audit


def all_samples(dataset: GPT2Dataset) -> list[list[int]]:
    return [dataset[n].tolist() for n in range(len(dataset))]


def test_samples_cover_the_shuffled_documents(data: DataConfig, tmp_path: Path) -> None:
    """A split's first epoch, put in order again, is a sequence of whole documents of the split, whatever sequences they
    have."""
    dataset = built(data).train
    with IndexedDatasetBuilder(tmp_path / "pieces", "u2") as builder:
        for document in DOCUMENTS:
            builder.add_document(*(document[start : start + 5] for start in range(0, len(document), 5)))
    pieces = built(replace(data, data_path=(str(tmp_path / "pieces"),))).train
    assert all_samples(pieces) == all_samples(dataset)
    tokens = sum(len(document) for document in DOCUMENTS[:40])
    first_epoch = all_samples(dataset)[: -(-tokens // 16)]
    assert all(len(sample) == 17 for sample in first_epoch)
    following = {sample[0]: sample for sample in first_epoch}
    # A document starts at a multiple of 100, so the stream can be followed from sample to sample.
    last_tokens = {sample[-1] for sample in first_epoch}
    start = next(sample for sample in first_epoch if sample[0] not in last_tokens)
    stream = start[:1]
    while stream[-1] in following and len(stream) <= tokens:
        stream += following[stream[-1]][1:]
    stream = stream[:tokens]
    seen = [token // 100 for token in stream if token % 100 == 0]
    assert sorted(seen) == list(range(40))
    assert seen != list(range(40))
    assert stream == [token for document in seen for token in DOCUMENTS[document]]


def test_splits_have_their_own_documents(data: DataConfig) -> None:
    datasets = built(data)
    used = [
        {token // 100 for sample in all_samples(dataset) for token in sample}
        for dataset in (datasets.train, datasets.valid, datasets.test)
    ]
    assert used == [set(range(40)), set(range(40, 50)), set(range(50, 60))]


def test_a_longer_run_sees_the_same_samples_first(data: DataConfig) -> None:
    short = all_samples(built(data).train)
    long = all_samples(built(data, {"train": 800}).train)
    assert long[: len(short)] == short


def test_cache_is_next_to_the_data_and_keyed_by_content(data: DataConfig) -> None:
    folder = Path(data.data_path[0]).parent / "index-cache"

    def names(config: DataConfig, samples: int = 80, **settings: int) -> set[str]:
        built(config, {"train": samples}, **settings)
        return {path.name for path in folder.glob("*.npy")}

    for ending in ("bin", "idx"):
        os.utime(f"{data.data_path[0]}.{ending}", ns=(1, 1))
    before = names(data)
    # As earlier versions named them, whose maps are read.
    maps = ("documents", "samples", "shuffle")
    assert before == {f"data_train_16sl_5s_65972c7d5bc86dea_epoch0_{name}.npy" for name in maps}
    assert names(data) == before
    before = names(data, seed=6)
    assert len(before) == 6
    assert names(data, 400) == before, "a longer run has the same epochs"
    for config in (replace(data, split="41,9,10"), replace(data, seq_length=15)):
        after = names(config)
        assert len(after) == len(before) + 3
        before = after
    os.utime(f"{data.data_path[0]}.bin", ns=(0, 0))
    assert len(names(data)) == len(before) + 3


def test_a_token_outside_the_vocabulary_is_located(write_dataset: Callable[..., str]) -> None:
    documents = [[1] * 10, [2] * 10, [3] * 4 + [99] + [3] * 5]
    data = DataConfig(data_path=(write_dataset(documents),), seq_length=29, split="1")
    dataset = built(data, vocab_size=100).train
    assert max(dataset[0]) == 99
    dataset = built(data, vocab_size=99).train
    with pytest.raises(DataError, match=r"data\.bin holds token 99 in document 2 at offset 4, .* ends at 98"):
        dataset[0]
    with pytest.raises(DataError, match=r"data\.bin holds token 99 in document 2 at offset 4, .* ends at 98"):
        dataset.take(range(4))


def test_a_split_without_a_sample_is_refused_with_the_arithmetic(data: DataConfig) -> None:
    tokens = sum(len(document) for document in DOCUMENTS[40:50])
    long = replace(data, seq_length=tokens)
    with pytest.raises(
        DataError, match=rf"\(documents 40 to 49 of 60: {tokens} tokens\) holds no sample of {tokens}\+1"
    ):
        check_data(long, SAMPLES)
    with pytest.raises(DataError):
        built(long)
    assert not (Path(data.data_path[0]).parent / "index-cache").exists()
    check_data(replace(data, seq_length=tokens - 1, split="40,10"), SAMPLES)
    check_data(long, {"train": 1})


@pytest.mark.parametrize(
    ("documents", "evaluations", "refused"), [(250, 1, None), (9, 0, None), (9, 1, "use --split 8,1,0,")]
)
def test_the_default_split_of_a_small_corpus(
    documents: int, evaluations: int, refused: str | None, write_dataset: Callable[..., str]
) -> None:
    """An empty test split is a warning, an empty validation split an error that names the flag which helps first."""
    data = DataConfig(data_path=(write_dataset([[1, 2, 3, 4, 5, 6]] * documents),), seq_length=4)
    samples = {"train": 1, "valid": evaluations, "test": evaluations}
    if refused:
        with pytest.raises(DataError, match=refused):
            check_data(data, samples)
        check_data(replace(data, split="8,1,0"), samples)
        return
    warnings = check_data(data, samples)
    assert len(warnings) == bool(evaluations)
    found = built(data, samples)
    assert found.train is not None and found.test is None and (found.valid is None) == (evaluations == 0)


def test_epochs_beyond_their_seeds_are_refused(data: DataConfig) -> None:
    with pytest.raises(DataError, match="epochs, and a run has 4,294,967,296 epochs at most"):
        built(data, {"train": 2**42})


@pytest.mark.parametrize("count", [0, 1, 20, 57, 200])
def test_tokens_counted_at_once_are_those_of_the_samples(write_dataset: Callable[..., str], count: int) -> None:
    """Of several epochs, empty documents, and documents of several samples."""
    chance = np.random.RandomState(4)
    prefix = write_dataset([[1] * length for length in chance.randint(0, 40, 30).tolist()])
    data = DataConfig(data_path=(prefix,), seq_length=16, split="20,5,5")
    datasets = built(data, {"train": 200, "valid": 200}, vocab_size=9, seed=3)
    skipped = [3, 4, 11] if count > 11 else []
    for part in (datasets.train, datasets.valid):
        assert isinstance(part, GPT2Dataset)
        documents = np.arange(part.documents.start, part.documents.stop)
        lengths, expected = part.indexed.lengths_of(documents), np.zeros(len(documents), np.int64)
        for index in sorted({*range(count)} - {*skipped}):
            *others, last = part.spans(index)
            for span in (*others, last._replace(stop=last.stop - 1)):
                expected[span.document - part.documents.start] += span.stop - span.start
        assert audit._gpt2_tokens_read(part, lengths, count, skipped).tolist() == expected.tolist()


def test_the_first_epoch_and_large_ones_are_stored(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = built(data, {"train": 360}).train
    rows = small.take(range(360))
    folder = Path(data.data_path[0]).parent / "index-cache"
    assert len(list(folder.glob("*_train_*.npy"))) == 3
    monkeypatch.setattr(map_cache, "LARGE", 1)
    large = built(replace(data, data_cache_path=str(tmp_path / "large")), {"train": 360}).train
    assert np.array_equal(large.take(range(360)), rows)
    assert len(list((tmp_path / "large").glob("*_train_*.npy"))) > 9


def test_a_disk_that_is_too_small_is_refused_before_training(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(ResourceError) as caught:
        built(data, {"train": 360})
    (line,) = caught.value.messages
    assert caught.value.exit_code == 7 and "the index maps need " in line and "the disk has 100 free" in line
    folder = Path(data.data_path[0]).parent / "index-cache"
    assert not list(folder.glob("*.npy"))
    monkeypatch.setattr(map_cache, "LARGE", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    started = built(data, {"train": 360}).train
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert started.take(range(100)).shape == (100, 17), "a disk that fills up during training does not end it"
