"""Scoring over pipeline stages, against the whole model on one rank."""

import torch
from torch.testing import assert_close

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig

TOKENS = torch.tensor([[3, 1, 4, 49, 5, 9, 2, 49, 6], [5, 3, 49, 5, 8, 9, 7, 9, 3]])


def logits_of_stages() -> torch.Tensor | None:
    """Logits of TOKENS, whose documents restart rotary positions without being kept apart, with a stage a rank."""

    from megatron.engines.containers import build_layers, sequential_model
    from megatron.engines.pipeline import PipelinedModel
    from megatron.model.architectures import GPT2
    from megatron.model.loss import lm_loss
    from megatron.model.partition import partition_boundaries
    from megatron.parallel.layout import ParallelLayout
    from megatron.parallel.pipeline.schedule import Schedule
    from megatron.tools.evaluation.scoring import ForwardModel

    stages = torch.distributed.get_world_size()
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, max_position_embeddings=16,
        vocab_size=50, padded_vocab_size=50, eod_token=49, init_method_std=0.3, position_embedding_type="rope",
        reset_position_ids=True,
    )  # fmt: skip
    layout = ParallelLayout.create(ParallelConfig(pipe_parallel_size=stages, world_size=stages))
    layers, loss = build_layers(GPT2.layers(config), config, layout), lm_loss(config, layout)
    bounds = partition_boundaries([2 // stages] * stages, config)
    parts = layers, loss, ActivationConfig(), layout
    module = PipelinedModel(*parts, partition_boundaries=bounds, schedule=Schedule("1f1b", stages, 1))
    if stages == 1:
        return sequential_model(config, ActivationConfig(), layout).eval()(TOKENS).detach().flatten(0, 1)
    with torch.no_grad():
        logits = ForwardModel(module.eval(), config, layout).logits(TOKENS, torch.ones_like(TOKENS, dtype=torch.bool))
    return None if logits is None else logits[0]


def test_rotary_positions_restart_on_every_stage(run_ranks):
    (whole,), (_, of_stages) = run_ranks(1, logits_of_stages), run_ranks(2, logits_of_stages)
    assert_close(of_stages, whole, rtol=1e-5, atol=1e-5)
