"""Global batches do not depend on the layout; a resumed reader continues exactly."""

import os
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from megatron.common.errors import DataError
from megatron.config.batch_schedule import BatchSchedule
from megatron.data.loader import Batch, MicroBatches, batches, next_token_batch

SAMPLES = 64


class Counting:
    """Sample n is the tokens 10 n .. 10 n + 4."""

    def __len__(self) -> int:
        return SAMPLES

    def take(self, indices: Sequence[int]) -> np.ndarray:
        return np.stack([np.arange(10 * index, 10 * index + 5) for index in indices])


class Broken(Counting):
    """Sample 5 cannot be read."""

    def take(self, indices: Sequence[int]) -> np.ndarray:
        if 5 in indices:
            raise DataError("x.bin holds token 9 in document 3")
        return super().take(indices)


def read(dataset: object = None, **changes: object) -> Iterator[Batch]:
    """``batches`` of 8 by 2 on one rank, but for the changes."""
    settings = {
        "micro_batch_size": 2,
        "data_rank": 0,
        "data_size": 1,
    }
    num_workers = changes.pop("num_workers", 0)
    first_sample = changes.pop("first_sample", 0)
    settings["sizes"] = BatchSchedule(((0, changes.pop("global_batch_size", 8)),), start_sample=first_sample)
    to_batch = partial(next_token_batch, eod_token=12, eod_mask_loss=bool(changes.pop("eod_mask_loss", False)))
    micro_batches = MicroBatches(dataset or Counting(), **{**settings, **changes})
    return batches(micro_batches, num_workers=num_workers, to_batch=to_batch)


def rows(micro_batches: Iterator[Batch]) -> list[int]:
    """The samples that were read."""
    return [int(first) // 10 for batch in micro_batches for first in batch.tokens[:, 0]]


@pytest.mark.parametrize(("data_size", "micro_batch_size", "finished"), [(1, 1, 0), (1, 4, 2), (2, 2, 1), (4, 1, 3)])
def test_batches_are_the_same_for_every_layout(data_size: int, micro_batch_size: int, finished: int) -> None:
    """They grow; also from the middle on, with samples that are skipped, and without the batch that is not complete."""
    sizes, skipped = BatchSchedule(((0, 4), (10, 8), (40, 16))), (range(5, 8), range(30, 31))
    of_rank = [
        rows(
            read(
                sizes=sizes, finished=finished, data_rank=rank, data_size=data_size, skipped=skipped,
                micro_batch_size=micro_batch_size,
            )
        )
        for rank in range(data_size)
    ]  # fmt: skip
    kept = [sample for sample in range(SAMPLES) if sample not in (5, 6, 7, 30)]
    for iteration in range(finished + 1, 9):
        share = sizes.size(iteration) // data_size
        made = [sample for mine in of_rank for sample in mine[:share]]
        assert made == kept[sizes.consumed(iteration - 1) : sizes.consumed(iteration)]
        of_rank = [mine[share:] for mine in of_rank]
    assert of_rank == [[]] * data_size and sizes.iterations(len(kept)) == 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resumed_reader_continues_exactly(num_workers: int) -> None:
    at_once = rows(read(data_rank=1, data_size=2))
    resumed = rows(read(first_sample=24, data_rank=1, data_size=2, num_workers=num_workers))
    assert at_once[12:] == resumed


def test_labels_are_the_next_tokens_and_the_mask_is_of_the_input() -> None:
    tokens, (labels, loss_mask) = next(read())
    assert tokens.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert labels.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert loss_mask.tolist() == [[1.0] * 4] * 2
    assert (tokens.dtype, labels.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert tokens.is_contiguous() and labels.is_contiguous()
    _, (_, loss_mask) = next(read(eod_mask_loss=True))
    assert loss_mask.tolist() == [[1.0] * 4, [1.0, 1.0, 0.0, 1.0]] and loss_mask.dtype == torch.float32


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_error_keeps_its_message(num_workers: int) -> None:
    reader = read(Broken(), num_workers=num_workers)
    assert rows([next(reader), next(reader)]) == [0, 1, 2, 3]
    with pytest.raises(DataError) as caught:
        next(reader)
    assert caught.value.messages == ["x.bin holds token 9 in document 3"]


def test_workers_exit_with_the_reader() -> None:
    before = child_processes()
    reader = read(num_workers=2)
    next(reader)
    workers = child_processes() - before
    assert len(workers) >= 2
    reader.close()
    deadline = time.monotonic() + 120
    while child_processes() & workers and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child_processes() & workers


def child_processes() -> set[int]:
    """Process ids of this process's children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(child) for child in file.read().split()}
