"""The three batch sizes: from any two the third, and a message if they contradict each other."""

import pytest
from support.command_lines import SMALL

from megatron.cli import parse_run
from megatron.common.errors import ConfigError


@pytest.mark.parametrize(
    "words, sizes",
    [
        ("--batch-size 2", (8, 2, 1)),
        ("--batch-size 2 --gas 3", (24, 2, 3)),
        ("--batch-size 2 --global-batch-size 24", (24, 2, 3)),
        ("--gas 3 --global-batch-size 24", (24, 2, 3)),
        ("--global-batch-size 24", (24, 6, 1)),
        ("--batch-size 2 --gas 3 --global-batch-size 24", (24, 2, 3)),
    ],
)
def test_batch_sizes_follow_from_each_other(words: str, sizes: tuple[int, int, int]) -> None:
    small = SMALL.replace("--batch-size 2", words).split()
    train = parse_run(small, {"WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu"}).train
    assert (train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps) == sizes


@pytest.mark.parametrize(
    "words, message",
    [
        ("--gas 2", "--batch-size is required (or --global-batch-size, or their keys in --deepspeed_config)"),
        ("--global-batch-size 64 --batch-size 4 --gas 2",
         "--global-batch-size 64 is not --batch-size 4 x --gas 2 x data-parallel size 4 = 32: set a global batch of 32"
         " or an accumulation of 4"),
        ("--global-batch-size 30 --batch-size 4",
         "--global-batch-size 30 is not a multiple of --batch-size 4 x data-parallel size 4 = 16: set a global batch of"
         " 16 or 32"),
        ("--global-batch-size 3",
         "--global-batch-size 3 is not a multiple of data-parallel size 4 = 4: set a global batch of 4"),
        ("--batch-size 0", "--batch-size 0 must be 1 or more"),
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_fit(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(SMALL.replace("--batch-size 2", words).split(), {"WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu"})
    assert caught.value.messages == [message]
