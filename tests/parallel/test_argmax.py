"""The argmax of vocabulary-parallel logits, compared with torch's."""

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax


@pytest.mark.parametrize("vocab_size", [8, 7, 4, 3])  # from 4 on down, the second rank has only padding
@pytest.mark.ranks(2)
def test_argmax_returns_the_first_of_equal_maxima(vocab_size: int) -> None:
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-6, 6, (3, 50, 8), generator=generator).float()  # with equals on both sides of each cut
    logits[..., vocab_size:] = 9.0  # padding, which is larger than all
    own = logits.chunk(group.size(), -1)[group.rank()]
    # torch's argmax takes any of equals; the first is what sorting that keeps their order begins with.
    expected = logits[..., :vocab_size].sort(dim=-1, descending=True, stable=True).indices[..., 0]
    torch.testing.assert_close(vocab_parallel_argmax(own, group, vocab_size), expected)
