"""Batches for one data-parallel rank: its rows of every global batch, as micro-batches, in order.

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
from megatron.data.datasets import ImageSamples, Samples, rank_sample_indices, sample_at
from megatron.data.image_slots import divided, refusal


class Batch(NamedTuple):
    """A micro-batch, as both engines accept it."""

    tokens: Tensor | tuple[Tensor, ...]
    """int64 [b, s]; for BERT [b, 2, s], tokens and token types; with --sft tokens and segment ids; for T5 [b, s + r]:
    tokens of the encoder, -1 for padding, and r of the decoder; for LLaVA
    images, uint8 [i, height, width, 3], and tokens and segment ids"""
    targets: tuple[Tensor, ...]
    """labels int64 [b, s], and loss_mask float32 [b, s]; for BERT also whether the sentences were swapped [b]"""


class MicroBatches(Dataset):
    """The micro-batches of one data-parallel rank, numbered from the global batch after ``finished`` ones on.

    Global batch n is as many samples as ``sizes`` say, after those of the batches before it, not counting those
    ``skipped``. They are cut into micro-batches, in order, or as ``divided`` says if they have images; rank r of D has
    the r-th of D equal parts of those. What a global batch consists of depends on nothing else.

    Args:
        dataset: samples, int64 and all of one shape, in the order of training.
        skipped: ranges of samples that are skipped, in order.
        image_slots: images that a micro-batch has room for; 0 for samples that have none.
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
        self.samples_together = micro_batch_size * data_size
        assert all(size % self.samples_together == 0 for _, size in sizes.steps)
        self.dataset, self.sizes, self.skipped, self.image_slots = dataset, sizes, skipped, image_slots
        self.micro_batch_size, self.data_rank, self.data_size = micro_batch_size, data_rank, data_size
        self.first_sample = sizes.consumed(finished)
        iterations = sizes.iterations(max(len(dataset) - sum(map(len, skipped)), self.first_sample))
        self.samples = sizes.consumed(iterations) - self.first_sample

    def __len__(self) -> int:
        return self.samples // self.samples_together

    def __getitem__(self, number: int) -> Any:
        """Samples of micro-batch ``number``, int64 [b, ...]; no tensor, for each of which a worker would open a file.

        Samples with images are a tuple, of which the second part is their images, uint8 [n, height, width, 3].

        A ``UserError`` is returned, not raised: from a worker the loader would raise it with the
        worker's traceback for its message.
        """
        # Of the samples before it, those of whole global batches, and those that all ranks read at the same time.
        before = self.first_sample + number * self.samples_together
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
        """The micro-batch of a global batch before which there are those of ``before`` samples."""
        dataset: ImageSamples = cast(ImageSamples, self.dataset)
        numbers = self._numbers(rows)
        members, images = divided(dataset.count_images(numbers)[None], len(rows) // self.micro_batch_size)
        if (most := int(images.max())) > self.image_slots:
            raise refusal(most, self.image_slots, f"global batch {iteration}")
        chosen = [numbers[member] for member in members[0, before // self.micro_batch_size]]
        return dataset.take(chosen), np.concatenate(dataset.images(chosen))


def batches(micro_batches: MicroBatches, *, num_workers: int, to_batch: Callable[[Any], Batch]) -> Iterator[Batch]:
    """The micro-batches in order. Raises DataError as their data set does, also if a worker reads it.

    Args:
        num_workers: processes that read ahead; with 0 this process reads.
        to_batch: converts samples, int64 [b, ...] or what the data set returns, into a micro-batch.
    """
    loader = DataLoader(
        micro_batches,
        batch_size=None,
        sampler=range(len(micro_batches)),
        collate_fn=lambda rows: rows,  # the data set returns whole micro-batches
        num_workers=num_workers,
        # A forked worker shares the index maps with this process instead of a copy of them. It
        # reads files and nothing else, so what forking does to process groups and devices does not matter.
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=partial(_start_worker, os.getpid()),
        # The loader draws a seed for its workers. From the global stream it would change dropout.
        generator=torch.Generator(),
    )
    for rows in loader:
        if isinstance(rows, UserError):
            raise rows
        yield to_batch(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows)


def next_token_batch(rows: Tensor, *, eod_token: int, eod_mask_loss: bool) -> Batch:
    """rows [b, s + 1] -> a batch whose labels are the next tokens.

    With ``eod_mask_loss``, positions whose input is ``eod_token`` do not count in the loss.
    """
    tokens = rows[:, :-1].contiguous()
    loss_mask = tokens.ne(eod_token).float() if eod_mask_loss else torch.ones(tokens.shape)
    return Batch(tokens, (rows[:, 1:].contiguous(), loss_mask))


def sft_batch(rows: Tensor) -> Batch:
    """rows [b, 4, s], tokens, segment ids, labels and loss mask -> a batch whose tokens [b, 2, s] are the first two."""
    return Batch(rows[:, :2].contiguous(), (rows[:, 2].contiguous(), rows[:, 3].float()))


def image_batch(rows: tuple[np.ndarray, np.ndarray], *, slots: int) -> Batch:
    """rows of ``sft_batch``, and images, uint8 [n, height, width, 3] -> a batch of as many images as ``slots``.

    Those after the n-th are black, and no text has their placeholders.
    """
    tokens, targets = sft_batch(torch.from_numpy(rows[0]))
    images = torch.zeros(slots, *rows[1].shape[1:], dtype=torch.uint8)
    images[: len(rows[1])] = torch.from_numpy(rows[1])
    assert isinstance(tokens, Tensor)
    return Batch((images, tokens), targets)


def span_batch(rows: Tensor, *, decoder_seq_length: int) -> Batch:
    """rows [b, s + 2 r], tokens of encoder and decoder, and labels, -1 for padding -> a batch for T5."""
    labels = rows[:, -decoder_seq_length:]
    tokens = rows[:, :-decoder_seq_length].contiguous()
    return Batch(tokens, (labels.clamp(min=0), labels.ge(0).float()))


def masked_lm_batch(rows: Tensor) -> Batch:
    """rows [b, 3, s], tokens, token types and labels -> a batch whose labels are the masked tokens.

    Labels are -1 elsewhere; that of the first token, [CLS], is 1 if the sentences were swapped, else 0.
    """
    labels = rows[:, 2]
    loss_mask = labels.ge(0).float()
    loss_mask[:, 0] = 0
    return Batch(rows[:, :2].contiguous(), (labels.clamp(min=0), loss_mask, labels[:, 0].contiguous()))


def _start_worker(parent: int, worker: int) -> None:
    exit_with_parent(parent)
    ignore_exit_signals()
