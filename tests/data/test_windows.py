"""Index maps and blends are built a window at a time: the same samples as all at once, at a cost that does not grow."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron.common.errors import ResourceError
from megatron.config import DataConfig
from megatron.data import blend_order, index_maps
from megatron.data.blend_order import BlendOrder, BlendPlan
from megatron.data.datasets import build_datasets
from megatron.data.index_maps import IndexMaps, SampleStream, WindowedMaps
from megatron.data.sentence_dataset import SentenceStream

SIZES = {"vocab_size": 6000, "global_batch_size": 4, "train_iters": 90, "eval_interval": 7, "eval_iters": 2, "seed": 5}


@pytest.mark.parametrize("window", [1, 30, 61])
@pytest.mark.parametrize(
    ("lengths", "seq_length"),
    [([5, 3, 7, 1, 4], 4), ([5, 0, 3, 0, 0, 7], 6), ([4, 4, 4], 4), ([100], 3), ([2] * 30, 59), ([9, 1], 9)],
)
def test_windows_hold_the_samples_of_the_whole_stream(
    lengths: list[int], seq_length: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_maps, "WINDOW", window)
    stream = SampleStream(np.array(lengths), seq_length, 150, 1234)
    whole, windowed = IndexMaps(**stream.build()), WindowedMaps(stream, SampleStream.build)
    assert len(windowed) == len(whole.shuffle) >= 150
    assert windowed.window_of(len(windowed) - 1) > 0, "one window"
    for index, sample in enumerate(whole.shuffle.tolist()):
        maps, at = windowed.locate(index)
        assert windowed.stream.window(windowed.window_of(index)).fits(vars(maps))
        # The documents from the start of a sample to that of the next one, and the offsets in the first and last.
        found = [
            (each.documents[begin[0] : end[0] + 1].tolist(), begin[1], end[1])
            for each, number in ((whole, sample), (maps, maps.shuffle.item(at)))
            for begin, end in [each.samples[number : number + 2].tolist()]
        ]
        assert found[0] == found[1]
    with pytest.raises(IndexError):
        windowed.locate(len(windowed))


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> DataConfig:
    documents = [list(range(100 * n, 100 * n + 1 + 7 * n % 23)) for n in range(60)]
    return DataConfig(data_path=(write_dataset(documents),), seq_length=16, split="40,10,10")


def test_a_data_set_is_the_same_in_windows(data: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = build_datasets(data, **SIZES).train
    monkeypatch.setattr(index_maps, "WINDOW", 200)
    elsewhere = replace(data, data_cache_path=str(tmp_path / "windows"))
    windowed = build_datasets(elsewhere, **SIZES).train
    assert len(windowed) == len(whole) >= 360 and windowed.maps.window_of(359) > 2
    assert np.array_equal(windowed.take(range(360)), whole.take(range(360)))
    assert len(list((tmp_path / "windows").glob("*_train_*.npy"))) == 3, "windows of several epochs are stored"
    monkeypatch.setattr(index_maps, "WINDOW", 1)
    large = build_datasets(elsewhere, **SIZES).train
    assert np.array_equal(large.take(range(200)), whole.take(range(200)))
    assert len(list((tmp_path / "windows").glob("*_train_*.npy"))) > 9, "epochs that are large are stored"


def test_a_disk_that_is_too_small_is_refused_before_training(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError) as caught:
        build_datasets(data, **SIZES)
    (line,) = caught.value.messages
    assert caught.value.exit_code == 7 and "the index maps need " in line and "the disk has 1,000 free" in line
    folder = Path(data.data_path[0]).parent / "index-cache"
    assert not list(folder.glob("*.npy"))
    monkeypatch.setattr(index_maps, "WINDOW", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    started = build_datasets(data, **SIZES).train
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert started.take(range(100)).shape == (100, 17), "a disk that fills up during training does not end it"


def test_pairs_of_sentences_have_the_same_order_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = np.array([0, 4, 9, 20])
    stream = SentenceStream(np.full(20, 5, np.int32), bounds, 12, 0.1, 40, 7)
    whole = stream.build()
    pairs = len(whole["runs"])
    monkeypatch.setattr("megatron.data.sentence_dataset.window_epochs", lambda pairs: 2)
    maps = stream.build()
    assert stream.fits(maps) and len(maps["order"]) == 2 * pairs < len(whole["order"])
    orders = []
    while epochs := stream.window(pairs, len(orders)):
        orders.append(stream.order(pairs, epochs))
    assert np.array_equal(orders[0], maps["order"]) and np.array_equal(np.concatenate(orders), whole["order"])


@pytest.mark.parametrize("weights", [(3, 5, 17), (1, 1), (90, 1, 1, 1, 1, 1), (7, 123, 1000, 13)])
def test_a_blend_has_the_same_order_in_windows(weights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
    plan = BlendPlan(shares, 400)
    order = BlendOrder(plan, **plan.build())
    whole, sources = [order[sample] for sample in range(400)], order.sources(400)
    monkeypatch.setattr(blend_order, "BLEND_WINDOW", 7)
    windowed = BlendOrder(plan, **plan.window(()).build())
    assert [windowed[sample] for sample in range(400)] == whole
    fresh = BlendOrder(plan, **plan.window(()).build())
    for samples in (399, 400, 5, 7, 14):
        assert np.array_equal(fresh.sources(samples), sources[:samples])
