"""Sequence parallelism against the same model with its sequence whole on every tensor-parallel rank."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.whole_models import SMALL_GPT2
from torch.testing import assert_close

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


@pytest.mark.ranks(1, 2, 4)
def test_sequence_parallel_equals_the_full_sequence() -> None:
    """Loss, logits and the gradients of all weights, accumulated over two passes."""
    for changes in VARIANTS:
        config = replace(CONFIG, **changes)
        whole, cut = (_model(config, _layout(sequence_parallel)) for sequence_parallel in (False, True))
        for _ in range(2):
            losses = [model(TOKENS, TARGETS) for model in (whole, cut)]
            sum(losses).backward()
        assert_close(*losses)
        assert_close(cut(TOKENS), whole(TOKENS))
        for (name, one), other in zip(whole.named_parameters(), cut.parameters(), strict=True):
            assert_close(other.grad, one.grad, msg=lambda text, name=name, why=changes: f"{why} {name}: {text}")


VARIANTS = [
    {},
    {"shape_order": "SBH"},
    {"reset_attention_mask": True, "reset_position_ids": True},
    {"reset_attention_mask": True, "reset_position_ids": True, "shape_order": "SBH"},
    {"apply_residual_connection_post_layernorm": True, "attention_softmax_in_fp32": True},
]


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


@pytest.mark.ranks(2, 4)
def test_all_to_all_of_heads_equals_full_attention() -> None:
    """The mean over the ranks of the loss, and of each weight's gradient, is that of one rank; alone and under TP 2."""
    world, group = dist.get_world_size(), dist.group.WORLD
    for changes in VARIANTS:
        for tensor in (1, 2) if world == 4 else (1,):
            config = replace(CONFIG, **changes)
            parallel = ParallelConfig(model_parallel_size=tensor, sequence_parallel=tensor > 1, world_size=world)
            layout = ParallelLayout.create(replace(parallel, ds_sequence_parallel_size=world // tensor))
            assert layout.get_sequence_data_parallel_world_size() == world // tensor
            whole, cut = (_model(config, place) for place in (ParallelLayout.create(parallel), layout))
            losses = [model(TOKENS, TARGETS) for model in (whole, cut)]
            sum(losses).backward()
            dist.all_reduce(losses[1].data, group=group)
            assert_close(losses[1] / world, losses[0])
            for (name, one), other in zip(whole.named_parameters(), cut.parameters(), strict=True):
                dist.all_reduce(other.grad, group=layout.get_sequence_data_parallel_group())
                mean = other.grad / layout.get_sequence_data_parallel_world_size()
                assert_close(mean, one.grad, msg=lambda text, name=name, why=changes: f"{why} {name}: {text}")
