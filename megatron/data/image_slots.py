"""Image slots of micro-batches: divides global batches by their numbers of images, and counts the slots of a run.

Each micro-batch has the same number of image slots, regardless of the images in its samples. Which samples form a
micro-batch depends on the images in the global batch and on the number of micro-batches, not on the ranks.
"""

from collections.abc import Sequence

import numpy as np

from megatron.common.errors import ConfigError, counted
from megatron.config import RunConfig
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.data import SPLITS
from megatron.data.datasets import ImageSamples, build_datasets, sample_at, split_samples

_SAMPLES_AT_ONCE = 1 << 16
"""Samples whose images are counted at once."""
_MOST_SAMPLES, _MOST_EPOCHS = 1 << 24, 1 << 10
"""Samples, and repetitions of the data, whose images are counted; a longer run gets the slots that always suffice."""


def balance_images(images: np.ndarray, micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide each global batch into micro-batches with the same number of samples, and about the same number of images.

    Samples are assigned in rounds of one for each micro-batch, those with most images first; in a round, the sample
    with most images goes to the micro-batch with fewest. ``images`` are the numbers of images of the samples, int64
    [n, samples of a global batch].

    Returns the samples of each micro-batch, in order, int64 [n, micro_batches, b], and its number of images, int64
    [n, micro_batches].
    """
    loads = np.zeros((len(images), micro_batches), np.int64)
    rounds = np.argsort(-images, axis=1, kind="stable").reshape(len(images), -1, micro_batches)
    members = np.empty_like(rounds)
    for number in range(rounds.shape[1]):
        fewest = np.argsort(loads, axis=1, kind="stable")
        np.put_along_axis(members[:, number], fewest, rounds[:, number], axis=1)
        loads += np.take_along_axis(images, members[:, number], axis=1)
    return np.sort(members.transpose(0, 2, 1), axis=2), loads


def too_many_images(needed: int, slots: int, where: str) -> ConfigError:
    """The error for a micro-batch with more images than image slots."""
    return ConfigError(
        f"{where} has a micro-batch of {counted(needed, 'image')}, {needed - slots} more than it has slots: give "
        f"--images-per-micro-batch {needed} or more, or leave it out and start again"
    )


def with_image_slots(run: RunConfig, skipped: Sequence[range] = ()) -> RunConfig:
    """``run`` with the number of image slots that its data needs or that the flag sets; unchanged without images.

    Samples ``skipped`` are not trained on. Raises ConfigError if ``--images-per-micro-batch`` is less than a
    micro-batch needs, and DataError as ``build_datasets``.
    """
    if not run.data.image_format:
        return run
    samples = split_samples(run.train, skipped)
    datasets = build_datasets(run.data, samples, vocab_size=0, seed=run.train.seed)
    most = 1
    for name in SPLITS:
        dataset: ImageSamples | None = getattr(datasets, name)
        if dataset is not None:
            is_train = name == "train"
            sizes = run.train.batches if is_train else run.train.evaluation_batches
            last = run.train.train_iters if is_train else samples[name] // run.train.global_batch_size
            first = sizes.start_iteration
            counted = min(_MOST_SAMPLES, _MOST_EPOCHS * dataset.samples_per_epoch)
            end = min(last, first + max(counted // run.train.global_batch_size, 1))
            left_out = skipped if is_train else ()
            needed, batch = _max_images(dataset, sizes, end, run.train.micro_batch_size, left_out)
            given = run.model.images_per_micro_batch
            if given is not None and needed > given:
                raise too_many_images(needed, given, f"global batch {batch} of {name}")
            rest = sizes.phases(end, last) if end < last else ()
            for phase in rest:  # as if the samples with most images were all in one global batch: see balance_images
                largest = dataset.most_images(phase.size)[:: phase.size // run.train.micro_batch_size]
                most = max(most, int(largest.sum()))
            most = max(most, needed)
    return run.with_image_slots(most)


def _max_images(
    dataset: ImageSamples, sizes: BatchSchedule, last: int, micro_batch_size: int, skipped: Sequence[range]
) -> tuple[int, int]:
    """The maximum number of images of a micro-batch up to global batch ``last``, and the number of that batch."""
    largest, phases = (0, 0), [*sizes.phases(sizes.start_iteration, last)]
    for phase, end in zip(phases, [*(phase.finished for phase in phases[1:]), last], strict=False):
        step = max(_SAMPLES_AT_ONCE // phase.size, 1)
        for finished in range(phase.finished, end, step):
            first = phase.first_sample + (finished - phase.finished) * phase.size
            numbers = range(first, first + min(step, end - finished) * phase.size)
            images = dataset.count_images([sample_at(number, skipped) for number in numbers])
            _, loads = balance_images(images.reshape(-1, phase.size), phase.size // micro_batch_size)
            images_of_batches = loads.max(axis=1)
            row = int(images_of_batches.argmax())
            if images_of_batches[row] > largest[0]:
                largest = int(images_of_batches[row]), finished + row + 1
    return largest
