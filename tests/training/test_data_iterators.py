"""Index maps are built once: for all ranks, or for those of each host."""

from types import SimpleNamespace

import pytest
from support.programs import TINY_MODEL

SETTINGS = "--train-iters 6 --batch-size 1 --global-batch-size 4 --eval-iters 1 --eval-interval 3".split()


def builds_of(shared: bool, local_ranks: list[int], cache: str, words: list[str]) -> int:
    """How many index maps this rank builds for its data iterators."""
    import os

    import torch.distributed as dist

    from megatron.cli import parse_run
    from megatron.data.gpt2_dataset import SampleStream
    from megatron.training.data_iterators import DataIterators

    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    flags = [] if shared else ["--no-shared-disk"]
    run = parse_run([*words, *flags, "--data-cache-path", cache.format(rank)], os.environ)
    os.environ["LOCAL_RANK"] = str(rank)
    built = []
    build = SampleStream.build
    SampleStream.build = lambda stream, epoch: built.append(epoch) or build(stream, epoch)
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
