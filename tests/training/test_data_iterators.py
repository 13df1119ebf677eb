"""What each token weighs in the loss, where a mask leaves micro-batches with different numbers of tokens.

Index maps are built once, for all ranks or for each host.
"""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.programs import TINY_MODEL
from torch import Tensor
from torch.testing import assert_close

from megatron.data.loader import Batch
from megatron.training.data_iterators import weighted, weighted_by_micro_batch

SAMPLES, TOKENS = 8, 6
LOSSES = torch.rand(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(1))
MASK = (torch.rand(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.4).float()
MASK[2], MASK[3] = 0, 1  # a micro-batch that is only sample 2 counts nothing


def micro_batches(size: int, rank: int, ranks: int) -> list[Batch]:
    """This rank's rows of one global batch; a token's loss stands in the place of the token."""
    of_rank = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    losses, masks = (rows[of_rank].split(size) for rows in (LOSSES, MASK))
    return [Batch(loss, (loss, mask)) for loss, mask in zip(losses, masks, strict=True)]


def loss_of(normalization: str, size: int, ranks: int) -> float:
    """The loss of the global batch, averaged as DeepSpeed does: over micro-batches, then over data ranks."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return float("nan")
    batches = micro_batches(size, dist.get_rank(), ranks)
    if normalization == "global-batch":
        batches_out = weighted(iter(batches), [len(batches)], group, masks=True)
    else:
        batches_out = weighted_by_micro_batch(iter(batches))
    loss = torch.stack([(losses * weights).sum() for losses, (_, weights) in batches_out]).mean()
    dist.all_reduce(loss, group=group)
    return loss.item() / ranks


def micro_batch_average(size: int) -> Tensor:
    """The classic loss by its definition."""
    means = [
        (losses * mask).sum() / max(mask.sum(), 1)
        for losses, mask in zip(LOSSES.split(size), MASK.split(size), strict=True)
    ]
    return torch.stack(means).mean()


SPLITS = [(1, 1), (2, 1), (8, 1), (1, 2), (4, 2)]


@pytest.mark.parametrize("size, ranks", SPLITS)
def test_global_batch_mean_does_not_depend_on_the_split(run_ranks, size: int, ranks: int) -> None:
    expected = (LOSSES * MASK).sum() / MASK.sum()
    for loss in run_ranks(2, loss_of, "global-batch", size, ranks)[:ranks]:
        assert_close(torch.tensor(loss), expected)


def test_micro_batch_mean_depends_on_the_split(run_ranks) -> None:
    found = {}
    for size, ranks in SPLITS:
        for loss in run_ranks(2, loss_of, "micro-batch", size, ranks)[:ranks]:
            assert_close(torch.tensor(loss), micro_batch_average(size))
        found[size] = loss
    assert len({round(loss, 4) for loss in found.values()}) == len(found)


@pytest.mark.ranks(1)
def test_both_losses_are_the_mean_without_a_mask() -> None:
    batches = [Batch(loss, (loss, torch.ones_like(loss))) for loss in LOSSES.split(2)]
    ways = weighted(iter(batches), [4], dist.group.WORLD, masks=False), weighted_by_micro_batch(iter(batches))
    for way in ways:
        assert_close(torch.stack([(losses * weights).sum() for losses, (_, weights) in way]).mean(), LOSSES.mean())


SETTINGS = "--train-iters 6 --batch-size 1 --global-batch-size 4 --eval-iters 1 --eval-interval 3".split()


def builds_of(shared: bool, local_ranks: list[int], cache: str, words: list[str]) -> int:
    """How many index maps this rank builds for its data iterators."""
    from megatron.cli import parse_run
    from megatron.data.gpt2_dataset import SampleStream
    from megatron.training.data_iterators import DataIterators
    from megatron.training.preflight import check

    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    flags = [] if shared else ["--no-shared-disk"]
    run, _ = check(parse_run([*words, *flags, "--data-cache-path", cache.format(rank)], os.environ))
    os.environ["LOCAL_RANK"] = str(rank)
    built = []
    build = SampleStream.build
    SampleStream.build = lambda stream, *made: built.append(made) or build(stream, *made)
    try:
        DataIterators(run, SimpleNamespace(rank=rank, is_first_stage=True, is_last_stage=True))
    finally:
        SampleStream.build = build
    return len(built)


@pytest.mark.parametrize(
    "shared, local_ranks, cache, expected",
    [
        (True, [0, 1], "one", [3, 0]),
        (False, [0, 1], "one", [3, 0]),
        (False, [0, 0], "host{}", [3, 3]),
    ],
)
def test_one_rank_builds_the_maps(run_ranks, programs, tmp_path, shared, local_ranks, cache, expected) -> None:
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS]
    found = run_ranks(2, builds_of, shared, local_ranks, str(tmp_path / cache), [str(word) for word in words])
    assert found == expected
