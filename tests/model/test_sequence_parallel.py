"""Dropout of hidden states, which sequence parallelism divides among the ranks of a tensor-parallel group."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.whole_models import SMALL_GPT2

from megatron.config import ActivationConfig, ParallelConfig
from megatron.engines.containers import sequential_model
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed

TOKENS = torch.randint(0, 21, (2, 12), generator=torch.Generator().manual_seed(2))
TARGETS = (TOKENS.roll(-1, 1), torch.full((2, 12), 1 / 24))


@pytest.mark.ranks(2)
def test_each_rank_drops_its_own_elements_of_a_divided_sequence_and_the_same_of_a_whole_one() -> None:
    for sequence_parallel, length in ((False, 12), (True, 6)):
        dropped = dropped_elements(sequence_parallel)
        assert dropped.shape == (2, 2, length, 16)
        assert torch.equal(dropped, dropped_elements(sequence_parallel)), "the same seed"
        of_ranks = [torch.empty_like(dropped) for _ in range(2)]
        dist.all_gather(of_ranks, dropped)
        for one, other in zip(*of_ranks, strict=True):
            assert 0.3 < one.mean() < 0.7
            assert torch.equal(one, other) is not sequence_parallel


def dropped_elements(sequence_parallel: bool) -> torch.Tensor:
    """1 where half of the embedding, and of what attention adds to it, is dropped: [2, b, s or s/t, h]."""
    parallel = ParallelConfig(model_parallel_size=2, sequence_parallel=sequence_parallel, world_size=2)
    layout = ParallelLayout.create(parallel)
    config = replace(SMALL_GPT2, num_layers=1, hidden_dropout=0.5)
    model = sequential_model(config, ActivationConfig(), layout).train()
    (layer,) = (module for module in model.modules() if isinstance(module, ParallelTransformerLayer))
    for parameter in layer.mlp.parameters():
        torch.nn.init.zeros_(parameter)
    seen: list[torch.Tensor] = []
    model.get_submodule("1").register_forward_hook(lambda *call: seen.append(call[-1].detach()))
    layer.register_forward_hook(lambda *call: seen.append(call[-1].detach() - seen[0]))
    model_parallel_manual_seed(5, layout)
    model(TOKENS, TARGETS)
    return (torch.stack(seen) == 0).float()
