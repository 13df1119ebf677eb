"""Context parallelism: attention in a ring of ranks, and the models that use it, against one rank that has it all."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.whole_models import SMALL_GPT2
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.config import ActivationConfig, ParallelConfig
from megatron.engines.containers import sequential_model
from megatron.ops import packed_attention
from megatron.ops.packed_attention import dense_mask
from megatron.ops.partial_attention import PartialAttention, merge
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import chunks_of, ring_attention, zigzag
from megatron.parallel.sequence.ring_attention import RingAttention, attending


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", ["none", "one", "short", "long", "mixed"])
def test_blocks_are_all_that_attend_once(monkeypatch, causal: bool, documents: str) -> None:
    """Each pair of tokens that attends is in one block, for every size of ring and window."""
    for size, window in itertools.product((1, 2, 3, 4), (0, 1, 3, 4, 5, 6, 9, 17, 10**6)):
        _check_blocks(monkeypatch, size, window, causal, documents)


def _check_blocks(monkeypatch, size: int, window: int, causal: bool, documents: str) -> None:
    """Their pairs of tokens, each in one block, are those of a dense mask; masks are small, and no step is missing."""
    monkeypatch.setattr(ring_attention, "chunk_size", lambda window: min(max(window, 2), 4))
    monkeypatch.setattr(packed_attention, "SHORTEST_BLOCK", 5)
    chunk, s = 7, 14 * size
    lengths = {"none": [], "one": [s], "short": [2] * (s // 2), "long": [s - 8, 8], "mixed": [6, 1, 3, 1, s - 11]}
    lengths = lengths[documents]
    ids = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    ring = RingAttention(None, False, causal, window, PartialAttention(False))
    like = torch.zeros(1)
    tokens = [
        torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in chunks_of(rank, size)])
        for rank in range(size)
    ]
    pairs, steps = torch.zeros(s, s, dtype=torch.int), {0}
    for rank, source in itertools.product(range(size), repeat=2):
        for block in attending(rank, source, size, chunk, causal, window, lengths):
            rows, columns = tokens[rank][block.queries], tokens[source][block.keys]
            mask = ring.mask(block, ids, like)
            if mask is None:
                seen = torch.ones(len(rows), len(columns), dtype=torch.bool)
                seen = seen.tril() if block.limit == "causal" else seen
            else:
                assert mask.shape == (len(rows), len(columns)) and len(rows) <= 5 and len(columns) <= 4 + 3
                seen = mask if mask.dtype == torch.bool else mask == 0
                assert mask.dtype == torch.bool or seen.any(1).all(), "a query without a key"
            pairs[rows.unsqueeze(1), columns] += seen
            steps.add((rank - source) % size)
    expected = torch.ones(s, s, dtype=torch.bool)
    expected = expected.tril().triu(-window) if causal else expected
    expected &= ids.unsqueeze(1) == ids if lengths else True
    assert pairs.equal(expected.int())
    apart = min(-(-window // chunk) if causal else 2 * size, 2 * size - 1)
    apart = min(apart, ring_attention._most_apart(lengths, chunk)) if lengths else apart
    within = set(ring_attention.steps_within(size, apart, causal))
    assert steps <= within and (lengths or steps == within)


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
    context, logsumexp = torch.zeros_like(query), torch.full((2, 4, 6), -torch.inf)
    for columns, seed in reversed(parts):
        of_part = key[:, :, columns], value[:, :, columns], seen[:, columns]
        merge(context, logsumexp, *kernel.forward(query, *of_part, False, seed))
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
            of_part = key[:, :, columns], value[:, :, columns], context, logsumexp, seen[:, columns]
            of_query, of_key, of_value = kernel.backward(grad, query, *of_part, False, seed)
            found[0] += of_query
            found[1][:, :, columns] += of_key
            found[2][:, :, columns] += of_value
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


@pytest.mark.ranks(4)
def test_ring_attention_equals_serial_attention() -> None:
    """Forward and gradients, by both ways to the keys of others; a mask of padding, documents, windows, groups."""
    generator = torch.Generator().manual_seed(3)
    for s, windows in ((32, (0, 5)), (1200, (40, 200, 700))):
        documents = torch.randint(0, s // 4 + 1, (2, s), generator=generator).eq(0).cumsum(-1).int()
        documents[1] = 0
        padding = -torch.arange(s).ge(20).int().expand(2, s)
        limits = [(True, s, None), *((True, window, None) for window in windows), (True, s, documents)]
        limits += [(True, windows[1], documents), (False, s, None), (False, s, padding)]
        heads = (4, 2, 2, 4) if s == 32 else (2, 1, 1, 2)
        tensors = [torch.randn(2, n, s, 8, generator=generator) for n in heads]
        for limit in limits:
            _equals_serial_attention(*tensors, *limit)


def _equals_serial_attention(query, key, value, grad, causal, window, ids):
    group, s = dist.group.WORLD, query.size(2)
    whole = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    mask = dense_mask(s, query.device, ids, window if causal else None)
    if mask is None and causal:
        mask = torch.ones(s, s, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
    wanted = torch.autograd.grad(expected, whole, grad)
    parts = [zigzag(tensor.detach(), group, 2).requires_grad_() for tensor in whole]
    for gathers, fused in itertools.product((False, True), repeat=2):
        ring = RingAttention(group, gathers, causal, window, PartialAttention(fused))
        found = ring(*parts, ids)
        gradients = torch.autograd.grad(found, parts, zigzag(grad, group, 2))
        why = f"s {s}, causal {causal}, window {window}, ids {ids is not None}, gathers {gathers}, fused {fused}"
        assert_close(found, zigzag(expected, group, 2).detach(), msg=lambda text, why=why: f"{why}: {text}")
        for one, other in zip(gradients, wanted, strict=True):
            assert_close(one, zigzag(other, group, 2), rtol=1e-4, atol=1e-5, msg=lambda text, why=why: f"{why}: {text}")


GPT2 = replace(SMALL_GPT2, num_layers=2, max_position_embeddings=16)
LLAMA = replace(
    GPT2, num_query_groups=2, position_embedding_type="rope", normalization="RMSNorm", swiglu=True, qk_layernorm=True,
    disable_bias_linear=True, untie_embeddings_and_output_weights=True,
)  # fmt: skip
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
            models = [sequential_model(config, ActivationConfig(), place).train() for place in (whole, layout)]
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
