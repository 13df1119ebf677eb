"""Attention against an account of it token by token: windows, documents, the softmax's type, what is recomputed."""

from dataclasses import replace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from support.whole_models import SMALL_GPT2
from torch import Tensor
from torch.testing import assert_close

from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines.containers import sequential_model
from megatron.model.attention import ParallelSelfAttention
from megatron.ops.attention import explicit_attention
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed

B, S, H, HEADS = 2, 9, 16, 4
CONFIG = replace(SMALL_GPT2, num_layers=2, max_position_embeddings=S)
HIDDEN = torch.randn(B, S, H, generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 5 + [1] * 4], dtype=torch.int32)
TOKENS = torch.randint(0, 21, (B, S), generator=torch.Generator().manual_seed(2))
TARGETS = (TOKENS.roll(-1, 1), torch.full((B, S), 1 / (B * S)))


def _layout() -> ParallelLayout:
    size = dist.get_world_size()
    layout = ParallelLayout.create(ParallelConfig(model_parallel_size=size, world_size=size))
    deepspeed.checkpointing.configure(layout)
    return layout


def _attention(config: ModelConfig = CONFIG) -> ParallelSelfAttention:
    attention = ParallelSelfAttention(config, _layout(), layer_number=2)
    torch.nn.init.normal_(attention.query_key_value.bias, generator=torch.Generator().manual_seed(7))
    return attention


def token_by_token(attention: ParallelSelfAttention, config: ModelConfig, documents: Tensor | None) -> Tensor:
    """HIDDEN -> [b, s, h] on one rank: token i sees i - N ... i, and of its own document only."""
    heads = attention.query_key_value(HIDDEN).view(B, S, HEADS, 3, H // HEADS)
    output = torch.empty(B, S, H)
    for sample in range(B):
        for i in range(S):
            seen = [
                j
                for j in range(i + 1)
                if i - j <= config.pre_tokens and (documents is None or documents[sample, i] == documents[sample, j])
            ]
            context = []
            for head in range(HEADS):
                query, (key, value) = heads[sample, i, head, 0], heads[sample, seen, head, 1:].unbind(1)
                context.append((key @ query / (H // HEADS) ** 0.5).softmax(0) @ value)
            output[sample, i] = attention.dense(torch.cat(context))
    return output


@pytest.mark.parametrize("pre_tokens", [0, 2, S - 2, S - 1, 65536])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("explicit", [False, True], ids=["fused", "explicit"])
@pytest.mark.ranks(1)
def test_a_token_sees_its_window(pre_tokens: int, documents: bool, explicit: bool) -> None:
    config = replace(CONFIG, pre_tokens=pre_tokens, attention_softmax_in_fp32=explicit)
    numbers = DOCUMENTS if documents else None
    attention = _attention(config)
    output, expected = attention(HIDDEN, numbers), token_by_token(attention, config, numbers)
    assert_close(output, expected)
    parameters = list(attention.parameters())
    grads = [torch.autograd.grad((y * y).mean(), parameters) for y in (output, expected)]
    assert_close(*grads, rtol=1e-4, atol=1e-6)
    shut = not documents and pre_tokens < S - 1
    everything = _attention(replace(CONFIG, attention_softmax_in_fp32=explicit))(HIDDEN)
    assert torch.allclose(output, everything) != (shut or documents)


def test_the_softmax_in_fp32_is_closer_to_fp32():
    """In bf16: the flag's own scores and softmax, against those of scores that were rounded to bf16 first."""
    heads = (4 * torch.randn(3, 2, HEADS, 64, 8, generator=torch.Generator().manual_seed(3))).bfloat16()
    exact = explicit_attention(*heads.float(), is_causal=True)
    in_fp32 = explicit_attention(*heads, is_causal=True, in_fp32=True)
    of_bf16 = explicit_attention(*heads, is_causal=True)
    assert in_fp32.dtype == of_bf16.dtype == torch.bfloat16
    assert (in_fp32 - exact).abs().mean() < 0.3 * (of_bf16 - exact).abs().mean()


@pytest.mark.parametrize("changes", [{}, {"attention_softmax_in_fp32": True}, {"reset_attention_mask": True}])
@pytest.mark.ranks(1, 2)
def test_selective_recomputation_repeats_the_core_alone(changes: dict) -> None:
    """With dropout: each core runs twice, each layer's linears once, and nothing changes, to the last bit."""
    layout, results = _layout(), []
    for recomputes in (False, True):
        config = replace(CONFIG, attention_dropout=0.3, hidden_dropout=0.2, recomputes_attention=recomputes, **changes)
        model = sequential_model(config, ActivationConfig(), layout).train()
        cores, linears = [], []
        for module in model.modules():
            if isinstance(module, ParallelSelfAttention):
                module.core.attend = _counted(module.core.attend, cores)
                module.query_key_value.register_forward_hook(lambda *_, linears=linears: linears.append(1))
        model_parallel_manual_seed(5, layout)
        losses = []
        for _ in range(2):
            loss = model(TOKENS, TARGETS)
            loss.backward()
            losses.append(loss.detach())
        results.append((losses, [p.grad for p in model.parameters()]))
        assert (len(cores), len(linears)) == (8 if recomputes else 4, 4)
    (losses, grads), (losses_again, grads_again) = results
    assert losses == losses_again and losses[0] != losses[1]
    assert all(torch.equal(one, other) for one, other in zip(grads, grads_again, strict=True))
    assert len(cores) == 8
    model.eval()(TOKENS)
    assert len(cores) == 10


def _counted(function, calls: list):
    def run(*arguments):
        calls.append(1)
        return function(*arguments)

    return run
