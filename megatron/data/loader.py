"""Loads the micro-batches of one data-parallel rank, in order, and converts samples into batches of the models.

Shapes: b micro-batch size, s sequence length.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron.common.errors import UserError
from megatron.common.processes import exit_with_parent, ignore_exit_signals
from megatron.config.batch_schedule import BatchSchedule
from megatron.data.datasets import ImageSamples, rank_sample_indices, sample_at
from megatron.data.image_slots import balance_images, too_many_images
from megatron.data.splits import Samples


class Batch(NamedTuple):
    """A micro-batch in the form that both engines accept."""

    tokens: Tensor | tuple[Tensor, ...]
    """int64 [b, s]; for BERT [b, 2, s], tokens and token types; with --sft tokens and segment ids; for T5 [b, s + r]:
    s tokens of the encoder, -1 for padding, and r of the decoder; for LLaVA a tuple of images, uint8
    [i, height, width, 3], and tokens with segment ids [b, 2, s]"""
    targets: tuple[Tensor, ...]
    """labels int64 [b, s], loss mask float32 [b, s], and for BERT whether the sentences are swapped [b]"""


class MicroBatches(Dataset):
    """The micro-batches of one data-parallel rank, from the first global batch after ``finished`` ones on.

    Global batches are consecutive ranges of samples, without the samples ``skipped``; ``sizes`` are their sizes. Each
    is cut into micro-batches, in order, or by ``balance_images`` if samples have images, and rank r of D gets the r-th
    of D equal parts of the micro-batches. The content of a global batch depends on nothing else.

    Args:
        dataset: samples in the order of training, int64, all of the same shape.
        skipped: ranges of samples that are skipped, in order.
        image_slots: maximum number of images in a micro-batch; 0 for samples without images.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        sizes: BatchSchedule,
        finished: int = 0,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        skipped: Sequence[range] = (),
        image_slots: int = 0,
    ) -> None:
        self.samples_of_all_ranks = micro_batch_size * data_size
        assert all(size % self.samples_of_all_ranks == 0 for _, size in sizes.steps)
        self.dataset, self.sizes, self.skipped, self.image_slots = dataset, sizes, skipped, image_slots
        self.micro_batch_size, self.data_rank, self.data_size = micro_batch_size, data_rank, data_size
        self.first_sample = sizes.consumed(finished)
        iterations = sizes.iterations(max(len(dataset) - sum(map(len, skipped)), self.first_sample))
        self.samples = sizes.consumed(iterations) - self.first_sample

    def __len__(self) -> int:
        return self.samples // self.samples_of_all_ranks

    def __getitem__(self, number: int) -> Any:
        """Samples of micro-batch ``number``, int64 [b, ...], and with images a tuple of samples and images, uint8
        [n, height, width, 3].

        The result is a NumPy array, because a worker opens a file for each tensor that it returns. A ``UserError`` is
        returned, not raised: a DataLoader raises a worker's exception with a traceback as its message.
        """
        # Samples of earlier micro-batches on all ranks; those in complete global batches give the current batch.
        before = self.first_sample + number * self.samples_of_all_ranks
        finished = self.sizes.iterations(before)
        first, size = self.sizes.consumed(finished), self.sizes.size(finished + 1)
        share = rank_sample_indices(first, size, self.data_rank, self.data_size)
        start = share.start + (before - first) // self.data_size
        try:
            if self.image_slots:
                return self._with_images(finished + 1, range(first, first + size), start - first)
            return self.dataset.take(self._numbers(range(start, start + self.micro_batch_size)))
        except UserError as error:
            return error

    def _numbers(self, rows: range) -> list[int]:
        return [sample_at(row, self.skipped) for row in rows]

    def _with_images(self, iteration: int, rows: range, before: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples and images of the micro-batch that starts ``before`` samples after the start of its global batch."""
        dataset: ImageSamples = cast(ImageSamples, self.dataset)
        numbers = self._numbers(rows)
        members, images = balance_images(dataset.count_images(numbers)[None], len(rows) // self.micro_batch_size)
        if (most := int(images.max())) > self.image_slots:
            raise too_many_images(most, self.image_slots, f"global batch {iteration}")
        chosen = [numbers[member] for member in members[0, before // self.micro_batch_size]]
        return dataset.take(chosen), np.concatenate(dataset.images(chosen))


def batches(micro_batches: MicroBatches, *, num_workers: int, to_batch: Callable[[Any], Batch]) -> Iterator[Batch]:
    """Yield the micro-batches in order. Raises the DataError of the data set, also from a worker.

    ``num_workers`` processes prefetch; with 0 this process reads. ``to_batch`` converts samples, int64 [b, ...] or with
    images the tuple, into a ``Batch``.
    """
    loader = DataLoader(
        micro_batches,
        batch_size=None,
        sampler=range(len(micro_batches)),
        collate_fn=lambda rows: rows,  # the data set returns complete micro-batches
        num_workers=num_workers,
        # A forked worker shares the index maps with this process. It only reads files, so that forking is safe: it
        # uses neither process groups nor devices.
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=partial(_start_worker, os.getpid()),
        # The loader draws a seed for its workers: from the global generator, that would change dropout.
        generator=torch.Generator(),
    )
    for rows in loader:
        if isinstance(rows, UserError):
            raise rows
        yield to_batch(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows)


def next_token_batch(rows: Tensor, *, eod_token: int, eod_mask_loss: bool) -> Batch:
    """rows [b, s + 1] -> a batch for GPT-2, whose labels are the next tokens.

    With ``eod_mask_loss``, positions with ``eod_token`` as input do not count in the loss.
    """
    tokens = rows[:, :-1].contiguous()
    loss_mask = tokens.ne(eod_token).float() if eod_mask_loss else torch.ones(tokens.shape)
    return Batch(tokens, (rows[:, 1:].contiguous(), loss_mask))


def sft_batch(rows: Tensor) -> Batch:
    """rows [b, 4, s] of tokens, segment ids, labels and loss mask -> a batch with tokens and segment ids [b, 2, s]."""
    return Batch(rows[:, :2].contiguous(), (rows[:, 2].contiguous(), rows[:, 3].float()))


def image_batch(rows: tuple[np.ndarray, np.ndarray], *, slots: int) -> Batch:
    """rows as of ``sft_batch`` and images, uint8 [n, height, width, 3] -> a batch with ``slots`` images.

    The images after the first n are black padding, without placeholders in the text.
    """
    tokens, targets = sft_batch(torch.from_numpy(rows[0]))
    images = torch.zeros(slots, *rows[1].shape[1:], dtype=torch.uint8)
    images[: len(rows[1])] = torch.from_numpy(rows[1])
    assert isinstance(tokens, Tensor)
    return Batch((images, tokens), targets)


def span_batch(rows: Tensor, *, decoder_seq_length: int) -> Batch:
    """rows [b, s + 2 r] of encoder tokens, decoder tokens and labels (-1 for padding) -> a batch for T5."""
    labels = rows[:, -decoder_seq_length:]
    tokens = rows[:, :-decoder_seq_length].contiguous()
    return Batch(tokens, (labels.clamp(min=0), labels.ge(0).float()))


def masked_lm_batch(rows: Tensor) -> Batch:
    """rows [b, 3, s] of tokens, token types and labels -> a batch for BERT.

    Labels are the original tokens at masked positions, -1 elsewhere, and at [CLS] 1 if the sentences are swapped or 0.
    """
    labels = rows[:, 2]
    loss_mask = labels.ge(0).float()
    loss_mask[:, 0] = 0
    return Batch(rows[:, :2].contiguous(), (labels.clamp(min=0), loss_mask, labels[:, 0].contiguous()))


def _start_worker(parent: int, worker: int) -> None:
    exit_with_parent(parent)
    ignore_exit_signals()
