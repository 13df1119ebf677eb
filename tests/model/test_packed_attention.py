"""Attention within documents and windows, against a dense mask; what it keeps, and the largest tensor on the way."""

from dataclasses import replace
from functools import partial

import deepspeed
import pytest
import torch
from support.saved_tensors import Largest
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.attention import ParallelSelfAttention
from megatron.ops.choices import DeviceFacts
from megatron.ops.packed_attention import attend_in_blocks, attend_varlen, dense_mask, document_lengths
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed

CONFIG = ModelConfig(
    num_layers=1, hidden_size=16, ffn_hidden_size=64, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0,
    max_position_embeddings=4096, init_method_std=0.3, reset_attention_mask=True,
)  # fmt: skip
ALL = 65536


def documents(s: int, mean: int, rows: int = 2) -> Tensor:
    """Segment ids [rows, s] of documents of random lengths; one row is a single document."""
    ends = torch.rand(rows, s, generator=torch.Generator().manual_seed(s + mean)) < 1 / mean
    ends[-1] = False
    return ends.int().cumsum(1, dtype=torch.int32)


def heads(s: int, n: int = 4, g: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query [2, n, s, 8], key and value [2, g, s, 8], as views of one tensor like those of a layer."""
    whole = torch.randn(2, s, n + 2 * g, 8, dtype=dtype, generator=torch.Generator().manual_seed(s))
    return [part.detach().requires_grad_() for part in whole.movedim(2, 1).split([n, g, g], 1)]


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal and mask is None, enable_gqa=query.size(1) != key.size(1)
    )


def gradients(context: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(5)).to(context)
    return torch.autograd.grad((context * weights).sum(), tensors)


@pytest.mark.parametrize("mean", [None, 2, 60, 250])
@pytest.mark.parametrize("window", [0, 9, 300, ALL, None])
def test_blocks_equal_a_dense_mask(window: int | None, mean: int | None) -> None:
    for s, groups in ((90, 4), (700, 2)):
        tensors, core = heads(s, g=groups), partial(fused, causal=window is not None)
        segment_ids = torch.zeros(2, s, dtype=torch.int32) if window is None else None
        segment_ids = documents(s, mean) if mean else segment_ids
        found = attend_in_blocks(*tensors, segment_ids, window, core)
        expected = core(*tensors, dense_mask(s, torch.device("cpu"), segment_ids, window))
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert_close(gradients(found, tensors), gradients(expected, tensors), rtol=1e-4, atol=1e-4)


def reference_varlen(
    query, key, value, ends, key_ends, longest, longest_key, *, window_size, enable_gqa=False
) -> Tensor:
    """torch's ``varlen_attn`` as its documentation has it, a sequence at a time, for any device."""
    assert query.dtype in (torch.bfloat16, torch.float16) and ends is key_ends and ends.dtype == torch.int32
    assert enable_gqa == (query.size(1) != key.size(1))
    lengths = ends.diff().tolist()
    assert longest == longest_key == max(lengths) and sum(lengths) == query.size(0)
    contexts = []
    for parts in zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True):
        back = torch.arange(len(parts[0])).unsqueeze(1) - torch.arange(len(parts[0]))
        left, right = (ALL if size < 0 else size for size in window_size)
        packed = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        contexts.append(fused(*packed, (back <= left) & (back >= -right), False)[0].transpose(0, 1))
    return torch.cat(contexts)


@pytest.mark.parametrize("window", [9, ALL, None])
@pytest.mark.parametrize("mean", [None, 60])
def test_varlen_is_called_as_documented(monkeypatch, window: int | None, mean: int | None) -> None:
    """The numbers of blocks come from the reference, and torch's own operator accepts the shapes."""
    s, core = 300, partial(fused, causal=window is not None)
    for groups in (4, 2):
        tensors = heads(s, g=groups, dtype=torch.bfloat16)
        segment_ids = documents(s, mean) if mean else None
        if segment_ids is not None:
            document_lengths(segment_ids)  # which needs numbers, and is kept
        shapes = [torch.empty_like(t, device="meta", requires_grad=True) for t in tensors]
        context = attend_varlen(*shapes, segment_ids, window)
        context.sum().backward()
        assert context.shape == tensors[0].shape and all(t.grad.shape == t.shape for t in shapes)
        if segment_ids is None and window is None:
            segment_ids = torch.zeros(2, s, dtype=torch.int32)
        with monkeypatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", reference_varlen)
            found = attend_varlen(*tensors, segment_ids, window)
        expected = attend_in_blocks(*tensors, segment_ids, window, core)
        assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert_close(gradients(found, tensors), gradients(expected, tensors), rtol=5e-2, atol=5e-2)


def _layout() -> ParallelLayout:
    layout = ParallelLayout.create(ParallelConfig())
    deepspeed.checkpointing.configure(layout)
    return layout


def bytes_of_attention(changes: dict, s: int, length: int) -> tuple[int, int]:
    """What a layer's attention keeps for its backward pass, and the largest tensor forward and backward."""
    config = replace(CONFIG, reset_attention_mask=length < s, **changes)
    layout = _layout()
    attention, storages = ParallelSelfAttention(config, layout, layer_number=1).train(), {}
    model_parallel_manual_seed(5, layout)
    segment_ids = (torch.arange(s).unsqueeze(0) // length).int() if length < s else None

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.randn(1, s, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Largest() as largest:
        output = attention(hidden, segment_ids)
        kept = sum(storages.values())
        output.sum().backward()
    return kept, largest.size


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 200),
        ({"attention_dropout": 0.1}, 200),
        ({"attention_softmax_in_fp32": True}, 200),
        ({"pre_tokens": 150}, ALL),
    ],
    ids=["documents", "dropout", "explicit", "window"],
)
def test_memory_grows_with_the_sequence_not_its_square(run_ranks, changes: dict, length: int) -> None:
    sizes = (1200, 3600)
    (small,), (large,) = (run_ranks(1, bytes_of_attention, changes, s, length) for s in sizes)
    for at_small, at_large in zip(small, large, strict=True):
        assert at_large < 1.1 * sizes[1] / sizes[0] * at_small
    assert large[1] < sizes[1] ** 2 / 8, "not even a mask of a bit for each pair of tokens"


@pytest.mark.ranks(1)
def test_dropout_is_reproducible_and_recomputed() -> None:
    """The same seed gives the same numbers, recomputed or not; another seed does not."""
    layout, results = _layout(), {}
    segment_ids = documents(400, 90)
    for seed, recomputes in ((5, False), (5, True), (6, False)):
        config = replace(CONFIG, attention_dropout=0.3, recomputes_attention=recomputes)
        attention = ParallelSelfAttention(config, layout, layer_number=1).train()
        hidden = torch.randn(2, 400, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model_parallel_manual_seed(seed, layout)
        output = attention(hidden, segment_ids)
        output.square().sum().backward()
        results[seed, recomputes] = torch.stack([output.detach(), hidden.grad])
    assert torch.equal(results[5, False], results[5, True])
    assert not torch.allclose(results[5, False], results[6, False], rtol=0.1)


@pytest.mark.ranks(1)
def test_a_gpu_gets_varlen_and_evaluation_needs_no_dropout() -> None:
    """A layer on a device that claims to be a GPU: varlen without dropout, blocks with it, with equal numbers."""
    calls = []

    def counted(*arguments, **options) -> Tensor:
        calls.append(arguments)
        return reference_varlen(*arguments, **options)

    layout = _layout()
    config = replace(CONFIG, hidden_size=32, attention_dropout=0.3, dtype="bf16")
    hidden, segment_ids = torch.randn(2, 300, 32).bfloat16(), documents(300, 60)
    expected = ParallelSelfAttention(config, layout, layer_number=1).bfloat16().eval()(hidden, segment_ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", counted)
        patch.setattr("megatron.ops.attention.device_facts", lambda device: DeviceFacts("cuda", (9, 0)))
        attention = ParallelSelfAttention(config, layout, layer_number=1).bfloat16().eval()
        assert_close(attention(hidden, segment_ids), expected, rtol=2e-2, atol=2e-2)
        assert len(calls) == 1
        model_parallel_manual_seed(5, layout)
        attention.train()(hidden, segment_ids)
        assert len(calls) == 1
