"""Attention with a key-value cache, against the entire sequence computed again."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron.config import ModelConfig

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
    "residual after the norm": {"apply_residual_connection_post_layernorm": True},
    "documents apart": {"reset_attention_mask": True, "reset_position_ids": True},
    "positions of documents": {"reset_position_ids": True},
    "experts": {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 8, "swiglu": True},
    "grouped queries": LLAMA,
    "grouped queries in a window": {**LLAMA, "pre_tokens": 3},
}


BEGINNINGS = [7, 3, 5]
"""Tokens of the sequences before the first step."""


def language_model(settings: dict):
    """``CONFIG`` with these settings, with a cache and without."""
    from support.whole_models import whole_model

    from megatron.tools.inference.model import LanguageModel

    config = replace(CONFIG, **settings)
    model = whole_model(config).eval()
    return LanguageModel(model, config, torch.distributed.group.WORLD), model


def difference(settings: dict) -> float:
    """The largest between logits of sequences of several lengths that grow in steps, and those of each alone."""
    from megatron.tools.inference.cache import KeyValueCache

    inference, model = language_model(settings)
    tokens = torch.randint(0, 49, (4, 16), generator=torch.Generator().manual_seed(1))

    def grown(rows: list[int], cache: KeyValueCache, counts: list[int]) -> float:
        """The difference after so many more tokens of these rows of ``tokens``."""
        new = torch.zeros(len(rows), max(counts), dtype=torch.long)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            new[place, :count] = tokens[row, done[row] : done[row] + count]
        kept = inference.next_logits(new, cache, counts)
        ends = [done[row] + count for row, count in zip(rows, counts, strict=True)]
        whole = torch.stack([model(tokens[row : row + 1, :end])[0, -1] for row, end in zip(rows, ends, strict=True)])
        assert whole.std(-1).min() > 0.1
        done.update(zip(rows, ends, strict=True))
        return (whole - kept).abs().max().item()

    done = dict.fromkeys(range(4), 0)
    with torch.no_grad():
        cache, late = inference.empty_cache(3), inference.empty_cache(1)
        worst = [grown([0, 1, 2], cache, BEGINNINGS), grown([0, 1, 2], cache, [1, 3, 2]), grown([3], late, [6])]
        cache.join(late)
        worst += [grown([0, 1, 2, 3], cache, [1, 1, 1, 1])]
        tokens[0], done[0] = tokens[2], done[2]
        cache.select([2, 3, 2])  # row 2 is continued twice, and row 1 is dropped
        worst += [grown([0, 3, 2], cache, [1, 1, 1]), grown([0, 3, 2], cache, [3, 2, 1])]
        done, even = dict.fromkeys(range(4), 0), inference.empty_cache(2)
        worst += [grown([1, 3], even, [count, count]) for count in (3, 1, 4, 1)]
    return torch.tensor(worst).max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_equals_uncached(kind, run_ranks):
    assert run_ranks(1, difference, KINDS[kind])[0] < 1e-4


@pytest.mark.parametrize("columns", [(0, 200), (128, 150), (128, 270), (256, 255), (300, 130)])
def test_caches_of_any_sizes_are_joined(columns: tuple[int, int]) -> None:
    from megatron.tools.inference.cache import KeyValueCache

    for sizes in (columns, columns[::-1]):
        caches = [KeyValueCache(CONFIG, 1, heads=2, dtype=torch.float32, device=torch.device("cpu")) for _ in sizes]
        for cache, size in zip(caches, sizes, strict=True):
            for count in (size - 1, 1) if size else ():  # the storage grows in steps
                cache.advance([count])
        caches[0].join(caches[1])
        caches[0].advance([1, 1])
        assert caches[0].positions.flatten().tolist() == [*sizes]


def test_the_layers_of_a_step_share_cosines_and_sines(run_ranks):
    """Each layer would otherwise start a dozen small kernels for the same values."""
    assert run_ranks(1, tables_of_two_steps) == [2]


def tables_of_two_steps() -> int:
    """How often cosines and sines are computed in two steps of a model of two layers."""
    from megatron.model.rotary import rotation_tables

    inference, _ = language_model(LLAMA)
    cache, name = inference.empty_cache(1), "megatron.tools.inference.cache.rotation_tables"
    with torch.no_grad(), patch(name, side_effect=rotation_tables) as computed:
        for tokens in ([[1, 2, 3]], [[4]]):
            inference.next_logits(torch.tensor(tokens), cache)
    return computed.call_count
