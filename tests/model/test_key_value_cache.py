"""What attention keeps, against the whole sequence computed anew."""

from dataclasses import replace

import pytest
import torch

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig

CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, max_position_embeddings=16,
    vocab_size=50, padded_vocab_size=50, eod_token=49, init_method_std=0.3,
)  # fmt: skip
LLAMA = {
    "num_query_groups": 2, "kv_channels": 6, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "swiglu": True, "qk_layernorm": True,
}  # fmt: skip
KINDS = {
    "plain": {},
    "sequence first": {"shape_order": "SBH"},
    "a window": {"pre_tokens": 3},
    "softmax in fp32": {"attention_softmax_in_fp32": True},
    "scaled scores": {"apply_query_key_layer_scaling": True},
    "residual after the norm": {"apply_residual_connection_post_layernorm": True},
    "documents apart": {"reset_attention_mask": True, "reset_position_ids": True},
    "positions of documents": {"reset_position_ids": True},
    "grouped queries": LLAMA,
    "grouped queries in a window": {**LLAMA, "pre_tokens": 3},
    "grouped queries, softmax in fp32": {**LLAMA, "attention_softmax_in_fp32": True},
}


def difference(settings: dict) -> float:
    """The largest between logits of sequences of several lengths that grow in steps, and those of each alone."""
    from megatron.model.gpt2 import GPT2Model
    from megatron.model.key_value_cache import KeyValueCache
    from megatron.parallel.layout import ParallelLayout
    from megatron.tools.inference.model import last_logits

    config = replace(CONFIG, **settings)
    model = GPT2Model(config, ActivationConfig(), ParallelLayout.create(ParallelConfig())).eval()
    tokens = torch.randint(0, 49, (3, 12), generator=torch.Generator().manual_seed(1))
    begins, worst, done = torch.tensor([0, 4, 2]), 0.0, 0
    cache = KeyValueCache(
        config, begins, 12, heads=config.query_groups, dtype=torch.float32, device=torch.device("cpu")
    )
    with torch.no_grad():
        for step in (5, 1, 3, 1, 2):
            if done == 6:  # row 2 is continued twice, and row 1 is dropped
                rows = torch.tensor([2, 0, 2])
                cache.select(rows)
                tokens, begins = tokens[rows], begins[rows]
            done += step
            kept = last_logits(model, tokens[:, done - step : done], cache)
            for row, begin in enumerate(begins):
                whole = model(tokens[row : row + 1, begin:done])[0, -1]
                assert whole.std() > 0.1
                worst = max(worst, (whole - kept[row]).abs().max().item())
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_equals_uncached(kind, run_ranks):
    assert run_ranks(1, difference, KINDS[kind])[0] < 1e-4
