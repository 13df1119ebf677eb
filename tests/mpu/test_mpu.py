"""megatron.mpu: what programs written for Megatron-LM's classic library call, against plain torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from megatron import mpu
from megatron.common.errors import ConfigError


@contextmanager
def groups(*sizes: int | None) -> Iterator[None]:
    mpu.initialize_model_parallel(*sizes)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()


def with_groups(check: Callable) -> Callable:
    """``check`` with each tensor-parallel size that divides the world."""

    @wraps(check)
    def call() -> None:
        size = 1
        while size <= dist.get_world_size():
            with groups(size):
                check()
            size *= 2

    return call


@pytest.mark.ranks(4)
@with_groups
def test_linear_layers() -> None:
    """Column then row with the classic defaults, which gather and scatter; results are pairs, and tensors."""
    seed_all(12)
    serial = [nn.Linear(8, 12), nn.Linear(12, 8)]
    seed_all(12)
    parallel = [
        mpu.ColumnParallelLinear(8, 12, init_method=uniform_of_linear, keep_master_weight_for_test=True),
        mpu.RowParallelLinear(12, 8, init_method=uniform_of_linear, keep_master_weight_for_test=True),
    ]
    for theirs, ours in zip(serial, parallel, strict=True):
        with torch.no_grad():
            theirs.weight.copy_(ours.master_weight)
            theirs.bias.zero_()
    x, y = (torch.linspace(-1, 1, 16).view(2, 8).requires_grad_() for _ in range(2))
    hidden, bias = parallel[0](x)
    assert bias is None
    total = torch.mul(parallel[1](torch.tanh(hidden)), 2.0).sum()
    expected = (serial[1](torch.tanh(serial[0](y))) * 2.0).sum()
    assert_close(total, expected)
    total.backward()
    expected.backward()
    assert_close(x.grad, y.grad)
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    for dim, theirs, ours in zip((0, 1), serial, parallel, strict=True):
        assert_close(ours.weight.grad, theirs.weight.grad.chunk(size, dim)[rank])
        assert ours.weight.tensor_model_parallel and ours.weight.partition_dim == dim
    assert_close(parallel[0].bias.grad, serial[0].bias.grad.chunk(size)[rank])
    assert_close(parallel[1].bias.grad, serial[1].bias.grad)


@pytest.mark.ranks(4)
@with_groups
def test_strides_and_biases() -> None:
    """Without gathering, with two matrices side by side in the weight, and with biases that are left to the caller."""
    seed_all(3)
    column = mpu.ColumnParallelLinear(
        6, 16, gather_output=False, init_method=nn.init.normal_, stride=2, keep_master_weight_for_test=True,
        skip_bias_add=True,
    )  # fmt: skip
    row = mpu.RowParallelLinear(8, 6, input_is_parallel=True, skip_bias_add=True, keep_master_weight_for_test=True)
    nn.init.normal_(row.bias)
    x = torch.linspace(-1, 1, 12).view(2, 6)
    pair, bias = column(x)
    first, second = pair.chunk(2, dim=-1)
    assert bias is column.bias
    y, bias = row(first * second)
    assert bias is row.bias
    one, two = (x @ column.master_weight.t()).chunk(2, dim=-1)
    assert_close(y, (one * two) @ row.master_weight.t())


@pytest.mark.ranks(4)
@with_groups
def test_embeddings() -> None:
    for kind, dim in ((mpu.VocabParallelEmbedding, 0), (mpu.layers.ParallelEmbedding, 1)):
        seed_all(5)
        serial = nn.Embedding(48, 16)
        seed_all(5)
        parallel = kind(48, 16, init_method=nn.init.normal_)
        tokens = torch.arange(34).view(2, 17) % 48
        weight = torch.randn(2, 17, 16)
        losses = [(layer(tokens) * weight).sum() for layer in (serial, parallel)]
        assert_close(*losses, rtol=0, atol=1e-5)
        for loss in losses:
            loss.backward()
        parts = serial.weight.grad.chunk(mpu.get_tensor_model_parallel_world_size(), dim)
        assert_close(parallel.weight.grad, parts[mpu.get_tensor_model_parallel_rank()])


@pytest.mark.ranks(4)
@with_groups
def test_losses() -> None:
    """Logits of three orders of magnitude, whose losses are rounded as plain torch rounds them."""
    seed_all(1)
    logits = (1000 * torch.randn(13, 17, 44)).requires_grad_()
    target = torch.randint(44, (13, 17))
    loss = mpu.vocab_parallel_cross_entropy(mpu.scatter_to_tensor_model_parallel_region(logits), target)
    expected = F.cross_entropy(logits.view(-1, 44), target.view(-1), reduction="none").view_as(target)
    assert_close(loss, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(value.mean(), logits)[0] for value in (loss, expected)]
    assert_close(*grads, rtol=0, atol=1e-6)


@pytest.mark.ranks(4)
@with_groups
def test_clipping() -> None:
    """Of weights that ranks share out, and of one that each has in full."""
    gradient, shared = torch.linspace(-2, 3, 8), torch.linspace(1, 2, 3)
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    for norm_type in (2, float("inf")):
        weights = [nn.Parameter(torch.zeros(8 // size)), nn.Parameter(torch.zeros(3))]
        mpu.set_tensor_model_parallel_attributes(weights[0], is_parallel=size > 1, dim=0, stride=1)
        weights[0].grad, weights[1].grad = gradient.chunk(size)[rank].clone(), shared.clone()
        expected = torch.cat([gradient, shared]).norm(norm_type).item()
        assert mpu.clip_grad_norm(weights, 1.0, norm_type) == pytest.approx(expected)
        assert_close(weights[0].grad, gradient.chunk(size)[rank] / expected)
        assert_close(weights[1].grad, shared / expected)


@pytest.mark.ranks(4)
@with_groups
def test_batches() -> None:
    data = {"text": torch.arange(6).view(2, 3), "mask": torch.ones(4, dtype=torch.long), "other": torch.zeros(1)}
    is_first = mpu.get_tensor_model_parallel_rank() == 0
    sent = mpu.broadcast_data(["text", "mask"], data if is_first else None, torch.int64)
    assert_close(sent, {"text": data["text"], "mask": data["mask"]})
    sizes = mpu.data._build_key_size_numel_dictionaries(["text", "mask"], data if is_first else None)
    assert sizes == ({"text": [2, 3], "mask": [4]}, {"text": 6, "mask": 4}, 10)
    with pytest.raises(AssertionError, match="other has data type"):
        mpu.data._check_data_types(["other"], data, torch.int64)
    size = mpu.get_tensor_model_parallel_world_size()
    if size == 1:  # only the first rank has the tensors
        with pytest.raises(ValueError, match="broadcast_data: text is torch.int64, not torch.float32"):
            mpu.broadcast_data(["text"], data, torch.float32)
    for whole in (torch.arange(8.0), torch.arange(24.0).view(4, 6).t()):
        chunk = mpu.split_tensor_into_1d_equal_chunks(whole)
        assert_close(chunk, whole.flatten().chunk(size)[mpu.get_tensor_model_parallel_rank()])
        assert_close(mpu.gather_split_1d_tensor(chunk), whole.flatten())
    if size > 1:
        with pytest.raises(ValueError, match=f"25 elements cannot be divided equally over {size} ranks"):
            mpu.split_tensor_into_1d_equal_chunks(torch.zeros(5, 5))


@pytest.mark.ranks(4)
@with_groups
def test_random_streams() -> None:
    mpu.model_parallel_cuda_manual_seed(12345)
    assert torch.initial_seed() == 12345
    with mpu.get_cuda_rng_tracker().fork():
        assert torch.initial_seed() == 12345 + 2718 + mpu.get_tensor_model_parallel_rank()
    state = torch.get_rng_state()
    first = torch.rand(3)
    mpu.random._set_cuda_rng_state(state)
    assert_close(torch.rand(3), first)
    mpu.get_cuda_rng_tracker().reset()


@pytest.mark.ranks(4)
@with_groups
def test_recomputation() -> None:
    """The second run draws what the first drew, from both streams."""
    mpu.model_parallel_cuda_manual_seed(7)
    x = torch.ones(64, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        with mpu.get_cuda_rng_tracker().fork():
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.5)

    y = mpu.checkpoint(block, x)
    y.sum().backward()
    assert_close(x.grad, y.detach())
    mpu.get_cuda_rng_tracker().reset()


def seed_all(seed: int) -> None:
    """As programs of Megatron-LM do at their start."""
    torch.manual_seed(seed)
    mpu.model_parallel_cuda_manual_seed(seed)


def uniform_of_linear(weight: Tensor) -> None:
    nn.init.uniform_(weight, -0.3, 0.3)


@pytest.mark.ranks(4)
def test_the_groups_of_two_by_two() -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second; the decoder begins on the second."""
    rank = dist.get_rank()
    pipe, tensor = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    expected = {"tensor": tensor, "pipe": pipe, "data": [rank], "model": [0, 1, 2, 3], "embedding": pipe}
    with groups(2, 2, 2, 1):
        stage = mpu.get_pipeline_model_parallel_rank()
        assert stage == rank // 2
        assert mpu.is_pipeline_first_stage() == mpu.is_pipeline_first_stage(True) == (stage == 0)
        assert not mpu.is_pipeline_last_stage() and mpu.is_pipeline_last_stage(ignore_virtual=True) == (stage == 1)
        mpu.set_virtual_pipeline_model_parallel_rank(1)
        assert not mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage() == (stage == 1)
        assert mpu.is_rank_in_embedding_group(ignore_virtual=True)
        assert mpu.is_rank_in_embedding_group() == (stage == 1)
        assert mpu.is_pipeline_stage_before_split() == mpu.is_pipeline_stage_at_split() == (stage == 0)
        assert mpu.is_pipeline_stage_after_split() == (stage == 1)
        assert dist.get_process_group_ranks(mpu.get_position_embedding_group()) == pipe
        assert mpu.get_pipeline_model_parallel_next_rank() == mpu.get_pipeline_model_parallel_prev_rank()
        assert mpu.get_pipeline_model_parallel_first_rank() == mpu.get_tensor_model_parallel_rank()
        assert mpu.get_pipeline_model_parallel_last_rank() == mpu.get_tensor_model_parallel_rank() + 2
        mpu.set_tensor_model_parallel_rank(9)
        assert mpu.get_tensor_model_parallel_rank() == 9
        names = {"tensor": "tensor_model", "pipe": "pipeline_model", "data": "data", "model": "model"}
        found = {key: getattr(mpu, f"get_{name}_parallel_group")() for key, name in names.items()}
        found["embedding"] = mpu.get_embedding_group()
        assert {key: dist.get_process_group_ranks(group) for key, group in found.items()} == expected


@pytest.mark.ranks(4)
def test_groups_are_made_once_and_needed() -> None:
    assert mpu.is_unitialized()
    with pytest.raises(ConfigError, match="call mpu.initialize_model_parallel"):
        mpu.get_tensor_model_parallel_rank()
    with pytest.raises(ConfigError, match="4 ranks cannot be divided into tensor-parallel size 3"):
        mpu.initialize_model_parallel(3)
    with groups(1, 4):
        with pytest.raises(ConfigError, match="was called before"):
            mpu.initialize_model_parallel(2)
        if mpu.get_pipeline_model_parallel_rank() == 1:
            with pytest.raises(ConfigError, match="stage 1 of the pipeline has no embedding"):
                mpu.get_embedding_group()
