"""Context parallelism: attention in a ring of ranks, and the models that use it, against one rank that has it all."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.model.gpt2 import GPT2Model
from megatron.model.packed_attention import dense_mask
from megatron.model.partial_attention import PartialAttention, merge
from megatron.model.ring_attention import RingAttention, attending
from megatron.mpu import ParallelLayout
from megatron.parallel.sequence.ring import chunks_of, zigzag


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 3, 6, 9, 10**6])
@pytest.mark.parametrize("causal, keeps_apart", [(True, False), (True, True), (False, False), (False, True)])
def test_blocks_are_all_that_attend_once(size: int, window: int, causal: bool, keeps_apart: bool) -> None:
    """Their pairs of tokens, each in one block, are those of the mask, or more where a mask decides among them."""
    chunk, s = 3, 6 * size
    expected = torch.ones(s, s, dtype=torch.bool)
    expected = expected.tril().triu(-window) if causal else expected
    tokens = [
        torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in chunks_of(rank, size)])
        for rank in range(size)
    ]
    pairs = torch.zeros(s, s, dtype=torch.int)
    for rank in range(size):
        for source in range(size):
            for block in attending(rank, source, size, chunk, causal, window, keeps_apart=keeps_apart):
                rows, columns = tokens[rank][block.queries], tokens[source][block.keys]
                seen = expected[rows][:, columns]
                if not block.is_limited:
                    assert seen.equal(torch.ones_like(seen).tril() if block.is_causal else torch.ones_like(seen))
                assert block.is_limited or not keeps_apart
                pairs[rows.unsqueeze(1), columns] += seen
    assert pairs.equal(expected.int())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("fused", [False, True])
def test_merged_parts_are_the_whole(fused: bool, dropout: float) -> None:
    """Context and gradients, also where a query sees nothing of a part, and with groups of heads that share a key."""
    torch.manual_seed(1)
    kernel = PartialAttention(fused, dropout)
    query, key, value = (torch.randn(2, heads, tokens, 8) for heads, tokens in ((4, 6), (2, 10), (2, 10)))
    seen = torch.rand(6, 10) < 0.5
    seen[:, 0] = True
    seen[2, 4:] = False  # sees nothing of the second part
    parts = [(slice(0, 4), 11), (slice(4, 10), 12)]
    context, logarithms = torch.zeros_like(query), torch.full((2, 4, 6), -torch.inf)
    for columns, seed in reversed(parts):
        of_part = key[:, :, columns], value[:, :, columns], seen[:, columns]
        merge(context, logarithms, *kernel.forward(query, *of_part, False, seed))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    if dropout:
        heads = key.repeat_interleave(2, 1)
        factors = [next(kernel._scores(query, heads[:, :, part], None, False, seed))[2] for part, seed in parts]
        weights = weights * torch.cat(factors, -1)
    expected = weights @ value.repeat_interleave(2, 1)
    assert_close(context, expected.detach())
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    found = [torch.zeros_like(tensor) for tensor in inputs]
    with torch.no_grad():
        for columns, seed in parts:
            of_part = key[:, :, columns], value[:, :, columns], context, logarithms, seen[:, columns]
            of_query, of_key, of_value = kernel.backward(grad, query, *of_part, False, seed)
            found[0] += of_query
            found[1][:, :, columns] += of_key
            found[2][:, :, columns] += of_value
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("size", [2, 4])
def test_ring_attention_equals_serial_attention(run_ranks, size):
    run_ranks(size, ring_attention_equals_serial_attention)


def ring_attention_equals_serial_attention():
    """Forward and gradients, by both ways to the keys of others; a mask of padding, documents, windows, groups."""
    group, s = dist.group.WORLD, 32
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, s, 8, generator=generator) for heads in (4, 2, 2))
    grad = torch.randn(2, 4, s, 8, generator=generator)
    documents = torch.randint(0, 9, (2, s), generator=generator).eq(0).cumsum(-1).int()
    documents[1] = 0
    padding = -torch.arange(s).ge(20).int().expand(2, s)
    cases = [
        (causal, window, ids, gathers, fused)
        for causal, window, ids in [
            (True, s, None),
            (True, 0, None),
            (True, 5, None),
            (True, s, documents),
            (True, 5, documents),
            (False, s, None),
            (False, s, padding),
        ]
        for gathers in (False, True)
        for fused in (False, True)
    ]
    for causal, window, ids, gathers, fused in cases:
        whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        mask = dense_mask(s, query.device, ids, causal, window)
        if mask is None and causal:
            mask = torch.ones(s, s, dtype=torch.bool).tril()
        expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
        wanted = torch.autograd.grad(expected, whole, grad)
        parts = [zigzag(tensor.detach(), group, 2).requires_grad_() for tensor in whole]
        ring = RingAttention(group, gathers, causal, window, PartialAttention(fused))
        found = ring(*parts, ids)
        why = (causal, window, gathers, fused)
        assert_close(found, zigzag(expected, group, 2).detach(), msg=lambda text, why=why: f"{why}: {text}")
        gradients = torch.autograd.grad(found, parts, zigzag(grad, group, 2))
        for one, other in zip(gradients, wanted, strict=True):
            assert_close(one, zigzag(other, group, 2), msg=lambda text, why=why: f"{why}: {text}")


GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=16,
    vocab_size=21,
    padded_vocab_size=24,
    eod_token=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.3,
)
LLAMA = replace(
    GPT2,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    qk_layernorm=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
MODELS = [
    GPT2,
    replace(GPT2, reset_attention_mask=True, reset_position_ids=True, shape_order="SBH"),
    replace(GPT2, pre_tokens=5, attention_softmax_in_fp32=True, recomputes_attention=True),
    LLAMA,
    replace(LLAMA, reset_attention_mask=True, reset_position_ids=True, pre_tokens=6),
]
TOKENS = torch.randint(0, 21, (2, 16), generator=torch.Generator().manual_seed(2))
WEIGHTS = torch.zeros(2, 16)
WEIGHTS[:, 2:5] = 1 / 6  # with four ranks, all tokens of the third and of the last rank are masked
TARGETS = (TOKENS.roll(-1, 1), WEIGHTS)
SPLITS = {
    2: [{"context_parallel_size": 2, "cp_comm_type": kind} for kind in ("p2p", "all_gather", "a2a")],
    4: [
        *({"context_parallel_size": 4, "cp_comm_type": kind} for kind in ("p2p", "all_gather")),
        {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)},
        {"context_parallel_size": 2, "ds_sequence_parallel_size": 2, "cp_comm_type": "all_gather"},
        {"context_parallel_size": 2, "model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2, "model_parallel_size": 2, "cp_comm_type": "a2a"},
    ],
}


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_models_equal_one_rank(run_ranks_once, size):
    run_ranks_once(size, context_parallel_models_equal_one_rank)


def context_parallel_models_equal_one_rank():
    """The mean over the ranks of the loss, and of each weight's gradient, is that of one rank; all are finite."""
    world = dist.get_world_size()
    for split in SPLITS[world]:
        parallel = ParallelConfig(world_size=world, **split)
        tensor = {"model_parallel_size": parallel.model_parallel_size, "sequence_parallel": parallel.sequence_parallel}
        whole = ParallelLayout.create(ParallelConfig(world_size=world, **tensor))
        layout = ParallelLayout.create(parallel)
        for config in MODELS:
            models = [GPT2Model(config, ActivationConfig(), place).train() for place in (whole, layout)]
            losses = [model(TOKENS, TARGETS) for model in models]
            sum(losses).backward()
            assert losses[1].isfinite()
            dist.all_reduce(losses[1].data)
            assert_close(losses[1] / world, losses[0])
            for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert other.grad.isfinite().all()
                dist.all_reduce(other.grad, group=layout.get_sequence_data_parallel_group())
                mean = other.grad / layout.get_sequence_data_parallel_world_size()
                assert_close(mean, one.grad, msg=lambda text, name=name, why=split: f"{why} {name}: {text}")
