"""Samples with images: micro-batches share image slots evenly, and no layout changes what a global batch is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.command_lines import parse

from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.data.datasets import build_datasets, samples_per_epoch, split_samples
from megatron.data.image_dataset import ImageDataset, image_writer
from megatron.data.image_slots import balance_images, with_image_slots
from megatron.data.loader import MicroBatches, image_batch

IMAGE = 60
"""The placeholder of ``SMALL_LLAVA``, whose images are of 28 x 28 pixels and 4 tokens."""
COUNTS = [(0, 0, 0, 1, 1, 5)[number * 7 % 6] for number in range(40)]
"""Images of each document."""


@pytest.fixture
def prefix(write_dataset: Callable[..., str]) -> str:
    """Document n has ``COUNTS[n]`` images, of the color n, and n as first token of its text."""
    documents = [[*[IMAGE] * 4 * count, number, *[61] * (number % 5), 62] for number, count in enumerate(COUNTS)]
    return write_images(write_dataset, documents, COUNTS)


def write_images(
    write_dataset: Callable[..., str], documents: Sequence[Sequence[int]], counts: Sequence[int], name: str = "data"
) -> str:
    prefix = write_dataset(documents, name=name)
    write_dataset([[1] * len(tokens) for tokens in documents], "u1", f"{name}_loss_mask")
    with image_writer(prefix, 28) as add:
        for number, count in enumerate(counts):
            add([np.full((28, 28, 3), number, np.uint8)] * count)
    return prefix


def run_of(prefix: str, words: str = "", *, ranks: int = 1) -> RunConfig:
    """Five global batches of eight samples of ``prefix``, without evaluation."""
    sizes = "--seq-length 32 --train-iters 5 --eval-iters 0 --global-batch-size 8 --split 1"
    command = f"llava --data-path {prefix} {sizes} {words}"
    run = parse(command, ranks=ranks)
    given = {"images_per_micro_batch": None} if "--images-per-micro-batch" not in words else {}
    return with_image_slots(replace(run, model=replace(run.model, **given)))


def read(
    run: RunConfig, *, ranks: int = 1, finished: int = 0, skipped: Sequence[range] = ()
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """The micro-batches of each data-parallel rank after ``finished`` iterations."""
    train = build_datasets(run.data, split_samples(run.train, skipped), vocab_size=64, seed=run.train.seed).train
    assert train is not None
    settings = {"sizes": run.train.batches, "finished": finished, "micro_batch_size": run.train.micro_batch_size}
    settings |= {"skipped": skipped}
    per_rank = (run.train.train_iters - finished) * 8 // run.train.micro_batch_size // ranks
    found = []
    for rank in range(ranks):
        batches = MicroBatches(train, **settings, data_rank=rank, data_size=ranks, image_slots=run.model.image_slots)
        found.append([batches[number] for number in range(per_rank)])
    return found


def global_batches(of_ranks: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], count: int) -> list[list[bytes]]:
    """The samples of each of ``count`` global batches, sorted."""
    share = len(of_ranks[0]) // count
    return [
        sorted(
            sample.tobytes()
            for one in of_ranks
            for text, _ in one[number * share : (number + 1) * share]
            for sample in text
        )
        for number in range(count)
    ]


def test_micro_batches_have_equally_many_samples_and_about_equally_many_images():
    random = np.random.RandomState(0)
    for size, micro_batches in ((8, 4), (24, 3), (6, 6), (12, 1), (64, 16)):
        images = random.choice([0, 0, 1, 2, 7], (50, size))
        members, loads = balance_images(images, micro_batches)
        assert (np.sort(members.reshape(50, -1), axis=1) == np.arange(size)).all()
        assert (np.take_along_axis(images, members.reshape(50, -1), 1).reshape(members.shape).sum(2) == loads).all()
        assert (loads.max(1) - loads.min(1) <= images.max(1)).all()
        in_order = images.reshape(50, micro_batches, -1).sum(2)
        assert loads.max() <= in_order.max() and (loads.max(1) <= in_order.max(1)).mean() > 0.9


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (2, 2), (4, 1), (1, 4)])
def test_every_layout_has_the_same_global_batches_and_images_of_their_texts(prefix: str, ranks: int, micro_batch: int):
    one = run_of(prefix, "--batch-size 1")
    other = run_of(prefix, f"--batch-size {micro_batch}", ranks=ranks)
    expected, found = read(one), read(other, ranks=ranks)
    assert global_batches(found, 5) == global_batches(expected, 5)
    assert global_batches(read(other, ranks=ranks, finished=2), 3) == global_batches(expected, 5)[2:]
    fullest = 0
    for text, images in (batch for of_rank in found for batch in of_rank):
        # Each document's images are in the slots that its placeholders count to.
        colors = images[:, 0, 0, 0].tolist()
        segments = [row[0][row[1] == segment] for row in text for segment in np.unique(row[1])]
        numbers = [(tokens[tokens < IMAGE][0], (tokens == IMAGE).sum() // 4) for tokens in segments if tokens.any()]
        assert colors == [number for number, count in numbers for _ in range(count)]
        (padded, _), _ = image_batch((text, images), slots=other.model.image_slots)
        assert len(padded) == other.model.image_slots and not padded[len(images) :].any()
        fullest = max(fullest, len(images))
    assert fullest == other.model.image_slots


def test_fewer_slots_than_a_global_batch_needs_are_refused_and_more_are_not(prefix: str):
    needed = run_of(prefix, "--batch-size 2").model.image_slots
    assert run_of(prefix, f"--batch-size 2 --images-per-micro-batch {needed + 1}").model.image_slots == needed + 1
    with pytest.raises(ConfigError, match=rf"global batch \d of train has a micro-batch of {needed} images") as error:
        run_of(prefix, f"--batch-size 2 --images-per-micro-batch {needed - 1}")
    assert f"--images-per-micro-batch {needed} or more" in str(error.value)
    run = run_of(prefix, "--batch-size 2")
    fewer = replace(run, model=replace(run.model, image_slots=needed - 1))
    assert any(isinstance(batch, ConfigError) for batch in read(fewer)[0])


def test_a_run_of_any_length_gets_its_slots_at_once(prefix: str, write_dataset: Callable[..., str], tmp_path: Path):
    """Beyond what is counted, they suffice for any order of the samples."""
    other = write_images(write_dataset, [[*[IMAGE] * 8, 50, 51]] * 9, [2] * 9, name="other")
    for data in (prefix, f"0.5 {prefix} 0.5 {other} --data-cache-path {tmp_path}/cache"):
        counted = run_of(data, "--batch-size 2 --train-iters 900").model.image_slots
        long = run_of(data, "--batch-size 2 --train-iters 1000000000").model.image_slots
        assert counted <= long < 2 * counted
    assert run_of(prefix, "--batch-size 2 --global-batch-size 65536").model.image_slots >= 5, "a batch of all epochs"


def test_skipped_samples_are_in_no_batch(prefix: str):
    longer, skipped = run_of(prefix, "--batch-size 2 --train-iters 6"), (range(8, 16),)
    run = with_image_slots(run_of(prefix, "--batch-size 4"), skipped)
    expected = global_batches(read(longer), 6)
    found = read(run, skipped=skipped)
    assert global_batches(found, 5) == [expected[0], *expected[2:]]
    assert max(len(images) for _, images in found[0]) == run.model.image_slots


def test_a_blend_has_the_images_of_its_parts(prefix: str, write_dataset: Callable[..., str], tmp_path: Path):
    other = write_images(write_dataset, [[*[IMAGE] * 8, 50, 51]] * 9, [2] * 9, name="other")
    blend = f"0.5 {prefix} 0.5 {other} --data-cache-path {tmp_path}/cache --batch-size 4"
    for text, images in read(run_of(blend))[0]:
        assert (text[:, 0] == IMAGE).sum() == 4 * len(images)


def test_a_long_document_ends_before_the_image_that_is_cut(write_dataset: Callable[..., str]):
    """Which the number of samples in an epoch accounts for."""
    documents = [[*[IMAGE] * 36, 1, 2]] * 4 + [[3] * 4] * 4
    prefix = write_images(write_dataset, documents, [9] * 4 + [0] * 4)
    run = run_of(prefix, "--seq-length 35 --batch-size 8")
    dataset = build_datasets(run.data, split_samples(run.train), vocab_size=64, seed=run.train.seed).train
    assert isinstance(dataset, ImageDataset)
    assert dataset.samples_per_epoch == samples_per_epoch(run.data) == 4
    assert dataset.count_images(range(8)).tolist() == [8] * 8 and run.model.image_slots == 64
