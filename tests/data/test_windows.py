"""Index maps are built an epoch at a time, and blends a window at a time, at a cost that does not grow."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from data.conftest import built

from megatron.common.errors import ResourceError
from megatron.config import DataConfig
from megatron.data import blend_order, map_cache
from megatron.data.blend_order import BlendOrder, BlendWindow, taken_before


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> DataConfig:
    documents = [list(range(100 * n, 100 * n + 1 + 7 * n % 23)) for n in range(60)]
    return DataConfig(data_path=(write_dataset(documents),), seq_length=16, split="40,10,10")


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


@pytest.mark.parametrize("weights", [(3, 5, 17), (1, 1), (90, 1, 1, 1, 1, 1), (7, 123, 1000, 13)])
def test_a_blend_has_the_same_order_in_windows(weights: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
    order = BlendOrder(shares, 400)
    whole = [order[sample] for sample in range(400)]
    monkeypatch.setattr(blend_order, "BLEND_WINDOW", 7)
    windowed = BlendOrder(shares, 400)
    assert [windowed[sample] for sample in range(400)] == whole
    for requested, sample in ((400, 399), (400, 5), (300, 7), (15, 14)):
        assert BlendOrder(shares, requested)[sample] == whole[sample]


def test_what_precedes_a_window_is_known_without_the_windows_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on after billions of samples computes neither their order nor reads it."""
    chance = random.Random(3)
    lists = [[chance.randint(1, 99) for _ in range(chance.randint(1, 30))] for _ in range(40)]
    for weights in [*lists, [1, 1], [1], [90, 1, 1, 1, 1, 1], [5000, 1, 3, 2], [1, 2, 4, 8, 16, 32, 64, 128]]:
        shares = tuple(Fraction(weight, sum(weights)) for weight in weights)
        order, taken = BlendOrder(shares, 1500), [0] * len(shares)
        for position in range(min(1500, sum(weights))):
            assert position % 7 or taken_before(shares, position) == tuple(taken), (weights, position)
            taken[order[position][0]] += 1
    monkeypatch.setattr(blend_order, "BLEND_WINDOW", 50)
    shares = tuple(Fraction(weight, 100003) for weight in (33331, 33331, 33341))
    firsts: list[int] = []

    def load(window: BlendWindow) -> dict[str, np.ndarray]:
        firsts.append(window.first)
        return window.build()

    late = [BlendOrder(shares, 100003, load)[sample] for sample in (77777, 77778)]
    assert firsts == [0, 77750, 0, 77750]
    firsts.clear()
    order = BlendOrder(shares, 100003, load)
    assert [order[sample] for sample in range(77779)][77777:] == late
    assert firsts == list(range(0, 77779, 50))
