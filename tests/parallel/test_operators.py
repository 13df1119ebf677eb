"""Embedding, cross entropy and argmax of a divided vocabulary against their serial counterparts, at TP 1 and 4."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.moe import ParallelMoE
from megatron.ops import choices as chunks
from megatron.ops.cross_entropy import CompiledCrossEntropyKernel, CrossEntropyKernel
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy
from megatron.parallel.tensor.layers import VocabParallelEmbedding, WeightInit

KERNELS = (CrossEntropyKernel, CompiledCrossEntropyKernel)
"""Not compiled, and compiled."""
NOT_COMPILED = patch("megatron.ops.cross_entropy._compiled", lambda function: function)
"""What would be compiled is run as it is."""
INIT = {"std": 0.3, "seed": 7}


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def _part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


@pytest.mark.ranks(1, 4)
def test_embedding() -> None:
    """Lookup and logits of a padded table equal those of nn.Embedding; the padding is zero and gets no lookup."""
    group, vocab, padded = dist.group.WORLD, 13, 16
    init = WeightInit(**INIT, name="table")
    parallel = VocabParallelEmbedding(vocab, 6, padded_size=padded, group=group, init=init)
    serial = nn.Embedding.from_pretrained(F.pad(init.draw((vocab, 6)), (0, 0, 0, padded - vocab)), freeze=False)
    tokens = torch.tensor([[0, 3, 12, 7], [5, 5, 1, 12]])
    hidden, hidden_serial = parallel(tokens), serial(tokens)
    assert_close(hidden, hidden_serial)
    logits, logits_serial = parallel.logits(hidden), F.linear(hidden_serial, serial.weight)
    assert_close(logits, _part(logits_serial, -1))
    weight = _input(2, 4, padded).detach()
    (logits * _part(weight, -1)).sum().backward()
    (logits_serial * weight).sum().backward()
    assert_close(parallel.weight.grad, _part(serial.weight.grad, 0))


@pytest.mark.ranks(2)
def test_nothing_is_copied_to_be_summed() -> None:
    """Of the embedding and of experts, whose rows are sums of no use to anything else."""
    layout = ParallelLayout.create(ParallelConfig(world_size=2, model_parallel_size=2))
    table = VocabParallelEmbedding(16, 8, group=layout.tensor_group, init=WeightInit(**INIT, name="table"))
    config = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, num_experts=2, init_method_std=0.3,
    )  # fmt: skip
    experts, tokens, copied = ParallelMoE(config, layout, layer_number=1), torch.zeros(2, 3, dtype=torch.int64), []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            copied.extend([args[0].shape] if func is torch.ops.aten.clone.default else [])
            return func(*args, **(kwargs or {}))

    with Copies():
        experts(table(tokens))
    assert torch.Size([2, 3, 8]) not in copied


@pytest.mark.parametrize("vocab", [16, 13, 3])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(1, 4)
def test_cross_entropy(vocab: int, compiled: bool) -> None:
    """Equal to torch's over the first ``vocab`` columns, also where a rank holds nothing but padding."""
    whole = _input(2, 5, 16)
    with torch.no_grad():
        whole[..., vocab:] += 50.0  # padding must not matter, however large
        whole[0, 0] *= 1000.0  # nor may large logits overflow
    labels = torch.randint(0, vocab, (2, 5), generator=torch.Generator().manual_seed(1))
    part = _part(whole, -1).detach().requires_grad_()
    weights = torch.linspace(0, 1, 10).view(2, 5)
    with NOT_COMPILED:
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, vocab, kernel=KERNELS[compiled]())
        (losses * weights).sum().backward()
    serial = F.cross_entropy(whole[..., :vocab].reshape(-1, vocab), labels.view(-1), reduction="none").view(2, 5)
    assert_close(losses, serial)
    (serial * weights).sum().backward()
    assert_close(part.grad, _part(whole.grad, -1))


@pytest.mark.parametrize(("elements", "compiled"), [(1, False), (20, False), (1000, False), (1, True)])
@pytest.mark.ranks(1, 4)
def test_cross_entropy_of_half_precision_in_fp32(elements: int, compiled: bool) -> None:
    """Equal to torch's of the same logits in fp32, however many are taken at a time."""
    whole = _input(2, 5, 16).detach().bfloat16()
    labels = torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(1))
    part, serial = _part(whole, -1).clone().requires_grad_(), whole.float().requires_grad_()
    expected = F.cross_entropy(serial.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    expected.sum().backward()
    with patch.dict(chunks.ELEMENTS_AT_ONCE, cpu=elements), NOT_COMPILED:
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, kernel=KERNELS[compiled]())
        losses.sum().backward()
    assert losses.dtype == torch.float32 and part.grad.dtype == torch.bfloat16
    assert_close(losses, expected)
    assert_close(part.grad, _part(serial.grad, -1).bfloat16(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(1, 4)
def test_labels_outside_the_vocabulary(compiled: bool) -> None:
    """Their loss is the logarithm of the exponentials' sum, which is NaN if a logit is."""
    vocab, whole = 13, _input(2, 5, 16)
    with torch.no_grad():
        whole[1, 4, 5] = torch.nan
    labels = torch.tensor([[-1, 3, vocab, 0, 2], [1, -100, 12, 16, -1]])
    part = _part(whole, -1).detach().requires_grad_()
    with NOT_COMPILED:
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, vocab, kernel=KERNELS[compiled]())
        losses[:, :4].sum().backward()
    counted = whole[..., :vocab]
    inside = (labels >= 0) & (labels < vocab)
    own = counted.gather(-1, (labels * inside).unsqueeze(-1)).squeeze(-1) * inside
    expected = counted.logsumexp(-1) - own
    assert_close(losses, expected, equal_nan=True)
    assert losses.isnan().sum() == 1
    expected[:, :4].sum().backward()
    assert_close(part.grad[:, :4], _part(whole.grad, -1)[:, :4])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.ranks(1, 4)
def test_cross_entropy_in_half_precision(compiled: bool) -> None:
    """Logarithms of probabilities are rounded, but not those of sums, on any number of ranks."""
    whole = (30 + 3 * _input(2, 50, 64).detach()).bfloat16()
    labels = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(1))
    part = _part(whole, -1).clone().requires_grad_()
    with NOT_COMPILED:
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, in_fp32=False, kernel=KERNELS[compiled]())
        losses.sum().backward()
    expected = F.cross_entropy(whole.float().flatten(0, 1), labels.flatten(), reduction="none").view(2, 50)
    assert losses.dtype == torch.bfloat16
    assert_close(losses.float(), expected, atol=0.03, rtol=0.01)
    assert part.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("vocab_size", [8, 7, 4, 3])  # from 4 on down, the second rank has only padding
@pytest.mark.ranks(2)
def test_argmax_returns_the_first_of_equal_maxima(vocab_size: int) -> None:
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-6, 6, (3, 50, 8), generator=generator).float()  # with equals on both sides of each cut
    logits[..., vocab_size:] = 9.0  # padding, which is larger than all
    own = logits.chunk(group.size(), -1)[group.rank()]
    # torch's argmax takes any of equals; the first is what sorting that keeps their order begins with.
    expected = logits[..., :vocab_size].sort(dim=-1, descending=True, stable=True).indices[..., 0]
    assert_close(vocab_parallel_argmax(own, group, vocab_size), expected)
