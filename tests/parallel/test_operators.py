"""Each tensor-parallel operator against its serial counterpart, values and gradients, at TP 1 and 4."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.ops import choices as chunks
from megatron.ops.cross_entropy import CompiledCrossEntropyKernel, CrossEntropyKernel
from megatron.parallel.sequence import all_to_all
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, WeightInit
from megatron.parallel.tensor.mappings import (
    broadcast_data,
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_split_1d_tensor,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
    split_tensor_into_1d_equal_chunks,
)

TENSOR_PARALLEL_SIZES = [1, 4]
KERNELS = (CrossEntropyKernel, CompiledCrossEntropyKernel)
"""Not compiled, and compiled."""
INIT = {"std": 0.3, "seed": 7}


@pytest.fixture(params=TENSOR_PARALLEL_SIZES)
def size(request):
    return request.param


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def _part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def test_tensor_parallel_mappings(run_ranks, size):
    run_ranks(size, tensor_parallel_mappings)


def tensor_parallel_mappings():
    """Forward by its definition; backward is the conjugate crossing of the gradient."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    x, scale = _input(2, 3, 8), rank + 1.0
    total = sum(r + 1.0 for r in range(n))

    assert_close(copy_to_model_parallel_region(x, group), x)
    (grad,) = torch.autograd.grad((copy_to_model_parallel_region(x, group) * scale).sum(), x)
    assert_close(grad, torch.full_like(x, total))

    assert_close(reduce_from_model_parallel_region(x * scale, group), x * total)
    (grad,) = torch.autograd.grad((reduce_from_model_parallel_region(x, group) * 5.0).sum(), x)
    assert_close(grad, torch.full_like(x, 5.0))

    assert_close(scatter_to_model_parallel_region(x, group), _part(x, -1))
    (grad,) = torch.autograd.grad((scatter_to_model_parallel_region(x, group) * scale).sum(), x)
    assert_close(grad, torch.cat([torch.full((2, 3, 8 // n), r + 1.0) for r in range(n)], -1))

    part = _part(x, -1).detach().requires_grad_()
    weight = _input(2, 3, 8).detach()
    assert_close(gather_from_model_parallel_region(part, group), x)
    (grad,) = torch.autograd.grad((gather_from_model_parallel_region(part, group) * weight).sum(), part)
    assert_close(grad, _part(weight, -1))


@pytest.mark.parametrize("dim", [0, 1])
def test_sequence_parallel_mappings(run_ranks, size, dim):
    run_ranks(size, sequence_parallel_mappings, dim)


def sequence_parallel_mappings(dim: int):
    """Forward by its definition along ``dim``; backward is the conjugate crossing of the gradient."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    x, weight, scale = _input(4, 8, 3), torch.arange(96.0).view(4, 8, 3), rank + 1.0
    total = sum(r + 1.0 for r in range(n))

    y = scatter_to_sequence_parallel_region(x, group, dim)
    assert_close(y, _part(x, dim))
    (grad,) = torch.autograd.grad((y * _part(weight, dim)).sum(), x)
    assert_close(grad, weight)

    part = _part(x, dim).detach().requires_grad_()
    y = gather_from_sequence_parallel_region(part, group, dim)
    assert_close(y, x)
    (grad,) = torch.autograd.grad((y * weight * scale).sum(), part)
    assert_close(grad, _part(weight, dim) * total)

    y = reduce_scatter_to_sequence_parallel_region(x * scale, group, dim)
    assert_close(y, _part(x, dim) * total)
    (grad,) = torch.autograd.grad((y * _part(weight, dim)).sum(), x)
    assert_close(grad, weight * scale)


def test_parallel_linear_layers(run_ranks, size):
    run_ranks(size, linears)


def linears():
    """Column then row equals two nn.Linear, with every way in and out; weights begin as the whole one's slices."""
    group = dist.group.WORLD
    first, second = (WeightInit(**INIT, name=name) for name in ("first", "second"))
    column = ColumnParallelLinear(8, 12, group=group, init=first)
    row = RowParallelLinear(12, 8, group=group, init=second)
    serial = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    with torch.no_grad():
        serial[0].weight.copy_(first.draw((12, 8)))
        serial[2].weight.copy_(second.draw((8, 12)))
        for linear, (parallel, dim) in zip((serial[0], serial[2]), ((column, 0), (row, None)), strict=True):
            linear.bias.copy_(torch.linspace(-1, 1, linear.bias.numel()))
            parallel.bias.copy_(linear.bias if dim is None else _part(linear.bias, dim))
    x, x_serial = _input(2, 5, 8), _input(2, 5, 8)
    y, y_serial = row(F.gelu(column(x))), serial(x_serial)
    assert_close(y, y_serial)
    (y * y).sum().backward()
    (y_serial * y_serial).sum().backward()
    assert_close(x.grad, x_serial.grad)
    assert_close(column.weight.grad, _part(serial[0].weight.grad, 0))
    assert_close(column.bias.grad, _part(serial[0].bias.grad, 0))
    assert_close(row.weight.grad, _part(serial[2].weight.grad, 1))
    assert_close(row.bias.grad, serial[2].bias.grad)

    gathering = ColumnParallelLinear(8, 12, group=group, init=first, gather_output=True)
    assert_close(gathering(x), F.linear(x, serial[0].weight))
    cutting = RowParallelLinear(12, 8, group=group, init=second, input_is_parallel=False)
    z = _input(2, 5, 12)
    assert_close(cutting(z), F.linear(z, serial[2].weight))
    fused = ColumnParallelLinear(8, 12, group=group, init=first, activation=lambda y, bias: F.gelu(y + bias))
    assert_close(fused(x), _part(F.gelu(F.linear(x, serial[0].weight)), -1))


def test_all_to_all(run_ranks, size):
    run_ranks(size, exchange)


def exchange():
    """Parts of the sequence with all heads become parts of the heads with the whole sequence, and back."""
    group, whole, weight = dist.group.WORLD, _input(2, 4, 8, 3), torch.arange(192.0).view(2, 4, 8, 3)
    part = _part(whole, 2).detach().requires_grad_()
    heads = all_to_all(part, group, split_dim=1, concat_dim=2)
    assert_close(heads, _part(whole, 1))
    assert_close(all_to_all(heads, group, split_dim=2, concat_dim=1), part)
    (grad,) = torch.autograd.grad((heads * _part(weight, 1)).sum(), part)
    assert_close(grad, _part(weight, 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_linear_layers_with_sequence_parallelism(run_ranks, size, dim):
    run_ranks(size, linear_layers_with_sequence_parallelism, dim)


def linear_layers_with_sequence_parallelism(dim: int):
    """Embedding, column, row and logits on parts of the sequence equal the same layers on the whole of it."""
    group, inits = dist.group.WORLD, [WeightInit(**INIT, name=name) for name in ("table", "first", "second")]

    def build(sequence_dim: int | None) -> list[nn.Module]:
        cut = {"group": group, "sequence_dim": sequence_dim}
        return [
            VocabParallelEmbedding(16, 8, init=inits[0], **cut),
            ColumnParallelLinear(8, 12, init=inits[1], **cut),
            RowParallelLinear(12, 8, init=inits[2], **cut),
        ]

    def run(layers: list[nn.Module], repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
        embedding, column, row = layers
        for _ in range(repeats):  # gradients accumulate
            hidden = row(F.gelu(column(embedding(tokens))))
            logits = embedding.logits(hidden)
            (logits * _part(weight, -1)).sum().backward()
        return hidden, logits

    tokens = torch.arange(32).view(4, 8) % 16
    weight = _input(4, 8, 16).detach()
    whole, cut = build(None), build(dim)
    (hidden, logits), (hidden_part, logits_cut) = run(whole, 2), run(cut, 2)
    assert_close(hidden_part, _part(hidden, dim))
    assert_close(logits_cut, logits)
    for one, other in zip(whole, cut, strict=True):
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_embedding(run_ranks, size):
    run_ranks(size, embedding)


def embedding():
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


@pytest.mark.parametrize("vocab", [16, 13, 3])
def test_cross_entropy(run_ranks, size, vocab):
    run_ranks(size, cross_entropy, vocab, False)
    run_ranks(size, cross_entropy, vocab, True)


def cross_entropy(vocab: int, compiled: bool):
    """Equal to torch's over the first ``vocab`` columns, also where a rank holds nothing but padding."""
    whole = _input(2, 5, 16)
    with torch.no_grad():
        whole[..., vocab:] += 50.0  # padding must not matter, however large
        whole[0, 0] *= 1000.0  # nor may large logits overflow
    labels = torch.randint(0, vocab, (2, 5), generator=torch.Generator().manual_seed(1))
    part = _part(whole, -1).detach().requires_grad_()
    with patch("torch.compile", lambda function: function):
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, vocab, kernel=KERNELS[compiled]())
    serial = F.cross_entropy(whole[..., :vocab].reshape(-1, vocab), labels.view(-1), reduction="none").view(2, 5)
    assert_close(losses, serial)
    weights = torch.linspace(0, 1, 10).view(2, 5)
    (losses * weights).sum().backward()
    (serial * weights).sum().backward()
    assert_close(part.grad, _part(whole.grad, -1))


@pytest.mark.parametrize("elements", [1, 20, 1000])
def test_cross_entropy_of_half_precision_in_fp32(run_ranks, size, elements):
    run_ranks(size, half_precision_cross_entropy, elements, False)


def test_compiled_cross_entropy_of_half_precision_in_fp32(run_ranks, size):
    run_ranks(size, half_precision_cross_entropy, 1, True)


def half_precision_cross_entropy(elements: int, compiled: bool):
    """Equal to torch's of the same logits in fp32, however many are taken at a time."""
    whole = _input(2, 5, 16).detach().bfloat16()
    labels = torch.randint(0, 16, (2, 5), generator=torch.Generator().manual_seed(1))
    part, serial = _part(whole, -1).clone().requires_grad_(), whole.float().requires_grad_()
    expected = F.cross_entropy(serial.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    expected.sum().backward()
    with patch.dict(chunks.ELEMENTS_AT_ONCE, cpu=elements), patch("torch.compile", lambda function: function):
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, kernel=KERNELS[compiled]())
        losses.sum().backward()
    assert losses.dtype == torch.float32 and part.grad.dtype == torch.bfloat16
    assert_close(losses, expected)
    assert_close(part.grad, _part(serial.grad, -1).bfloat16(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_labels_outside_the_vocabulary(run_ranks, size, compiled):
    run_ranks(size, labels_outside, compiled)


def labels_outside(compiled: bool):
    """Their loss is the logarithm of the exponentials' sum, which is NaN if a logit is."""
    vocab, whole = 13, _input(2, 5, 16)
    with torch.no_grad():
        whole[1, 4, 5] = torch.nan
    labels = torch.tensor([[-1, 3, vocab, 0, 2], [1, -100, 12, 16, -1]])
    part = _part(whole, -1).detach().requires_grad_()
    with patch("torch.compile", lambda function: function):
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, vocab, kernel=KERNELS[compiled]())
    counted = whole[..., :vocab]
    inside = (labels >= 0) & (labels < vocab)
    own = counted.gather(-1, (labels * inside).unsqueeze(-1)).squeeze(-1) * inside
    expected = counted.logsumexp(-1) - own
    assert_close(losses, expected, equal_nan=True)
    assert losses.isnan().sum() == 1
    losses[:, :4].sum().backward()
    expected[:, :4].sum().backward()
    assert_close(part.grad[:, :4], _part(whole.grad, -1)[:, :4])


@pytest.mark.parametrize("compiled", [False, True])
def test_cross_entropy_in_half_precision(run_ranks, size, compiled):
    run_ranks(size, cross_entropy_in_half_precision, compiled)


def cross_entropy_in_half_precision(compiled: bool):
    """Logarithms of probabilities are rounded, but not those of sums, on any number of ranks."""
    whole = (30 + 3 * _input(2, 50, 64).detach()).bfloat16()
    labels = torch.randint(0, 64, (2, 50), generator=torch.Generator().manual_seed(1))
    part = _part(whole, -1).clone().requires_grad_()
    with patch("torch.compile", lambda function: function):
        losses = vocab_parallel_cross_entropy(part, labels, dist.group.WORLD, in_fp32=False, kernel=KERNELS[compiled]())
    expected = F.cross_entropy(whole.float().flatten(0, 1), labels.flatten(), reduction="none").view(2, 50)
    assert losses.dtype == torch.bfloat16
    assert_close(losses.float(), expected, atol=0.03, rtol=0.01)
    losses.sum().backward()
    assert part.grad.dtype == torch.bfloat16


def test_broadcast_data(run_ranks, size):
    for received in run_ranks(size, broadcast):
        assert received == {"tokens": [[1, 2], [3, 4]], "labels": [5]}


def broadcast():
    """What the first rank holds, on every rank, shapes included."""
    data = {"tokens": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([5])} if dist.get_rank() == 0 else None
    received = broadcast_data(["tokens", "labels"], data, torch.int64, dist.group.WORLD)
    return {key: value.tolist() for key, value in received.items()}


def test_broadcast_data_refuses_another_type(run_ranks):
    (message,) = run_ranks(1, broadcast_of_another_type)
    assert message == "broadcast_data: tokens is torch.float32, not torch.int64"


def broadcast_of_another_type() -> str:
    with pytest.raises(ValueError) as caught:
        broadcast_data(["tokens"], {"tokens": torch.zeros(1)}, torch.int64, dist.group.WORLD)
    return str(caught.value)


def test_a_tensor_is_divided_into_equal_chunks_and_gathered(run_ranks, size):
    run_ranks(size, chunks_and_whole)


def chunks_and_whole():
    """The inverse of each other; chunks are consecutive elements, also of a tensor that is not contiguous."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for whole in (_input(2, 3, 4).detach(), _input(4, 6).detach().t()):
        part = split_tensor_into_1d_equal_chunks(whole, group)
        assert_close(part, whole.flatten()[24 // n * rank : 24 // n * (rank + 1)])
        assert_close(gather_split_1d_tensor(part, group), whole.flatten())
    if n > 1:
        with pytest.raises(ValueError, match=f"25 elements cannot be divided equally over {n} ranks"):
            split_tensor_into_1d_equal_chunks(torch.zeros(5, 5), group)
