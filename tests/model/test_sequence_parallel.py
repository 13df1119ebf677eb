"""Dropout under sequence parallelism; tests/training/test_layouts_agree.py compares the rest with one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.whole_models import SMALL_GPT2

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines.containers import SequentialModel, sequential_model
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed

CONFIG = replace(SMALL_GPT2, num_layers=2, max_position_embeddings=14)
TOKENS = torch.randint(0, 21, (2, 12), generator=torch.Generator().manual_seed(2))
TARGETS = (TOKENS.roll(-1, 1), torch.full((2, 12), 1 / 24))


def _layout(sequence_parallel: bool) -> ParallelLayout:
    size = dist.get_world_size()
    return ParallelLayout.create(
        ParallelConfig(model_parallel_size=size, sequence_parallel=sequence_parallel, world_size=size)
    )


def _model(config: ModelConfig, layout: ParallelLayout, activation: ActivationConfig | None = None) -> SequentialModel:
    return sequential_model(config, activation or ActivationConfig(), layout).train()


def test_each_rank_has_its_own_shard_and_dropout(run_ranks):
    whole, *others = run_ranks(2, hidden_states, False)
    assert torch.equal(whole, others[0]) and whole.shape == (3, 2, 12, 16)
    parts = run_ranks(2, hidden_states, True)
    assert [part.shape for part in parts] == [(3, 2, 6, 16)] * 2
    dropped = [part[0] == 0 for part in parts]
    assert all(0.2 < mask.float().mean() < 0.8 for mask in dropped)
    assert not torch.equal(*dropped)
    assert all(torch.equal(*runs) for runs in zip(parts, run_ranks(2, hidden_states, True), strict=True))


def hidden_states(sequence_parallel: bool) -> torch.Tensor:
    """What comes out of the embedding and of each transformer layer, half of it dropped: [3, b, s or s/t, h]."""
    layout = _layout(sequence_parallel)
    model = _model(replace(CONFIG, hidden_dropout=0.5), layout)
    seen: list[torch.Tensor] = []
    model.get_submodule("1").register_forward_hook(lambda *call: seen.append(call[-1].detach()))
    for layer in model.modules():
        if isinstance(layer, ParallelTransformerLayer):
            layer.register_forward_hook(lambda *call: seen.append(call[-1].detach()))
    model_parallel_manual_seed(5, layout)
    model(TOKENS, TARGETS)
    return torch.stack(seen)


@pytest.mark.ranks(2)
def test_recomputation_drops_the_same() -> None:
    """Bit by bit the loss and the gradients of a run that keeps everything."""
    config = replace(CONFIG, attention_dropout=0.2, hidden_dropout=0.2, reset_attention_mask=True)
    layout = _layout(True)
    results = []
    for granularity in (None, "full", "selective"):
        activation = ActivationConfig(checkpoint_activations=granularity is not None, recompute_granularity=granularity)
        model = _model(replace(config, recomputes_attention=granularity == "selective"), layout, activation)
        model_parallel_manual_seed(3, layout)
        loss = model(TOKENS, TARGETS)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))
