"""Matmuls in FP8 against dequantized fp64, the quantized weights that are kept, and tensor parallelism."""

from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from megatron.common.errors import ResourceError
from megatron.config import ModelConfig, ParallelConfig
from megatron.launch import extensions
from megatron.launch.extensions import check_fp8
from megatron.model.transformer import ParallelMLP
from megatron.ops.choices import DeviceFacts, runs_in_fp8, why_no_fp8
from megatron.ops.fp8 import E4M3, E5M2, Fp8LinearKernel, Quantized, quantize
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.linear import linear

INPUTS, OUTPUTS, ROWS = 48, 32, 40
CONFIG = ModelConfig(
    num_layers=1, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, max_position_embeddings=8, dtype="bf16",
    fp8_format="hybrid", fp8_min_size=16, init_method_std=0.3,
)  # fmt: skip
KINDS = [*product(("hybrid", "e4m3"), ("tensorwise", "rowwise"))]


def config_of(fp8_format: str, recipe: str) -> ModelConfig:
    return ModelConfig(fp8_format=fp8_format, fp8_recipe=recipe)


def kernel_of(fp8_format: str = "hybrid", recipe: str = "tensorwise") -> Fp8LinearKernel:
    return Fp8LinearKernel(config_of(fp8_format, recipe), lambda largest: largest, is_column_parallel=True)


def random(*shape: int, seed: int = 1) -> Tensor:
    """Rows of different sizes, in bf16."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))).bfloat16()


def exact(tensor: Quantized) -> Tensor:
    return tensor.values.double() * tensor.inverse_scale.double()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("share", [None, lambda largest: largest])
def test_quantized_values_are_near(dtype: torch.dtype, share) -> None:
    """Within half a unit in the last place, of rows of zeros and with the largest magnitude of the type."""
    rows = torch.cat([random(ROWS, INPUTS), torch.zeros(1, INPUTS)]).bfloat16()
    found = quantize(rows, dtype, share)
    assert (found.inverse_scale.log2() % 1 == 0).all()
    relative, finest = (2**-4, 2**-10) if dtype == E4M3 else (2**-3, 2**-17)
    error = (exact(found) - rows.double()).abs()
    assert (error <= rows.double().abs() * relative + finest * found.inverse_scale.double()).all()
    assert found.values[:-1].float().abs().max() > torch.finfo(dtype).max / 2 - 1


@pytest.mark.parametrize(("fp8_format", "recipe"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_matmuls_are_those_of_the_quantized_tensors(fp8_format: str, recipe: str, bias: bool) -> None:
    share = None if recipe == "rowwise" else lambda largest: largest
    kernel, x, weight, grad = (
        kernel_of(fp8_format, recipe),
        random(ROWS, INPUTS),
        random(OUTPUTS, INPUTS, seed=2),
        random(ROWS, OUTPUTS, seed=3),
    )
    added = random(OUTPUTS, seed=4) if bias else None
    quantized = [exact(quantize(one, E4M3, share)) for one in (x, weight, weight.t())]
    of_gradient = exact(quantize(grad, E5M2 if fp8_format == "hybrid" else E4M3, share))
    output = kernel.forward(x.view(2, ROWS // 2, INPUTS), weight, added)
    expected = quantized[0] @ quantized[1].t() + (added.double() if bias else 0.0)
    assert_close(output.flatten(0, 1).double(), expected, rtol=2**-8, atol=2**-8)
    assert_close(kernel.input_gradient(grad, weight).double(), of_gradient @ quantized[2].t(), rtol=2**-8, atol=2**-8)
    assert torch.equal(kernel.weight_gradient(grad, x, weight), grad.t() @ x)


@pytest.mark.parametrize(("fp8_format", "recipe"), KINDS)
def test_errors_of_a_layer(fp8_format: str, recipe: str) -> None:
    """Relative to the product of what was not quantized; e5m2 has one bit less."""
    x, weight = torch.randn(64, 256).bfloat16().requires_grad_(), nn.Parameter(torch.randn(128, 256).bfloat16())
    grad = torch.randn(64, 128).bfloat16()
    linear(x, weight, kernel=kernel_of(fp8_format, recipe)).backward(grad)
    with torch.no_grad():
        output = linear(x, weight, kernel=kernel_of(fp8_format, recipe)).double()
        errors = [
            (found.double() - wanted).norm() / wanted.norm()
            for found, wanted in (
                (output, x.double() @ weight.double().t()),
                (x.grad, grad.double() @ weight.double()),
                (weight.grad, grad.double().t() @ x.double()),
            )
        ]
    assert errors[0] < 0.045 and errors[1] < (0.07 if fp8_format == "hybrid" else 0.045) and errors[2] < 0.005, errors


@pytest.mark.parametrize(("recipe", "times"), [("tensorwise", 1), ("rowwise", 2)])
def test_a_weight_is_quantized_once_until_it_changes(recipe: str, times: int) -> None:
    """``_version`` counts what is written to the weight, but not to a flat tensor that it is a view of."""
    flat, kernel = random(OUTPUTS * INPUTS), kernel_of(recipe=recipe)
    weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    weight.data = flat.view(OUTPUTS, INPUTS)

    def pass_through() -> Tensor:
        x = random(ROWS, INPUTS).requires_grad_()
        linear(x, weight, kernel=kernel).backward(random(ROWS, OUTPUTS))
        return x.grad

    before = [pass_through() for _ in range(3)]
    assert kernel.quantizations == times and torch.equal(before[0], before[2])
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(pass_through(), 2 * before[0]) and kernel.quantizations == 2 * times
    flat.mul_(2)
    assert torch.equal(pass_through(), 2 * before[0]), "or ``forget`` is not needed"
    kernel.forget()
    assert torch.equal(pass_through(), 4 * before[0]) and kernel.quantizations == 3 * times


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_tensor_parallel_layers_equal_one_process(recipe: str, sequence_parallel: bool) -> None:
    """Output and gradients of an MLP, column-parallel and row-parallel, whose ranks' parts have other magnitudes."""
    rank = dist.get_rank()
    config = ModelConfig(**{**vars(CONFIG), "fp8_recipe": recipe})
    parallel = partial(ParallelConfig, world_size=2)
    layouts = (
        ParallelLayout.create(parallel(model_parallel_size=2, sequence_parallel=sequence_parallel)),
        ParallelLayout.create(parallel()),
    )
    found = []
    for layout in layouts:
        mlp = ParallelMLP(config, layout, layer_number=1).bfloat16()
        hidden = random(8, 2, 32).transpose(0, 1).contiguous()
        t, part = layout.tensor_group.size(), slice(4 * rank, 4 * rank + 4) if layout.sequence_parallel else slice(None)
        x = hidden[:, part].clone().requires_grad_()
        y = mlp(x)
        y.backward(random(8, 2, 32, seed=5).transpose(0, 1)[:, part])
        inner = slice(64 // t * layout.tensor_group.rank(), 64 // t * (layout.tensor_group.rank() + 1))
        found.append((part, inner, y, x.grad, mlp.dense_h_to_4h.weight.grad, mlp.dense_4h_to_h.weight.grad))
    (part, inner, *ours), (_, _, *whole) = found
    expected = [whole[0][:, part], whole[1][:, part], whole[2][inner], whole[3][:, inner]]
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).float().norm() < 0.01 * other.float().norm()


@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.ranks(2)
def test_ranks_gather_rows_in_fp8(sequence_dim: int) -> None:
    """Half the bytes and the scales; inputs bit by bit as gathered in bf16, and gradients under frozen weights.

    Of a column-parallel layer, whose backward pass computes the weight's gradient in bf16, and of a row-parallel one.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    received: list[int] = []
    gather = dist.all_gather_into_tensor

    def counted(output: Tensor, *arguments, **options):
        received[-1] += output.nbytes
        return gather(output, *arguments, **options)

    def mine(x: Tensor) -> Tensor:
        return x.chunk(2, sequence_dim)[rank].contiguous()

    x, weight = random(2, 16, INPUTS), nn.Parameter(random(OUTPUTS, INPUTS, seed=2))
    grad, frozen = random(2, 16, OUTPUTS, seed=3), random(OUTPUTS, INPUTS, seed=4)
    make, whole = partial(kernel_of, recipe="rowwise"), kernel_of(recipe="rowwise")
    with patch.object(dist, "all_gather_into_tensor", counted):
        for chunks in (1, 4):
            received.append(0)
            y = linear(mine(x).requires_grad_(), weight, None, group, sequence_dim, kernel=make(), chunks=chunks)
        assert torch.equal(y, whole.forward(x, weight, None)) and received[0] == received[1]
        received.append(0)
        y.backward(grad)
        part = random(2, 16, INPUTS).requires_grad_()
        y = linear(part, frozen, None, group, sequence_dim, kernel=make(), sums_outputs=True)
        received.append(0)
        y.backward(mine(grad))
    assert torch.equal(part.grad.flatten(0, 1), whole.input_gradient(grad.flatten(0, 1), frozen))
    assert torch.equal(weight.grad, grad.flatten(0, 1).t() @ x.flatten(0, 1))
    tokens, scale = 2 * 16, 4
    assert received[1:] == [tokens * (INPUTS + scale), 2 * tokens * INPUTS, tokens * (OUTPUTS + scale)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.ranks(2)
def test_compiled_tensor_parallel_layers_compute_the_same(recipe: str, sequence_parallel: bool) -> None:
    """Output and gradients of an MLP bit by bit, and no weight that is kept: the next step has another one."""
    config = ModelConfig(**{**vars(CONFIG), "fp8_recipe": recipe})
    parallel = ParallelConfig(
        world_size=2, model_parallel_size=2, sequence_parallel=sequence_parallel, tp_comm_overlap=True
    )
    mlp = ParallelMLP(config, ParallelLayout.create(parallel), layer_number=1).bfloat16()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        found = []
        for run in (mlp, compiled):
            x = random(2, 8 if not sequence_parallel else 4, 32, seed=dist.get_rank()).requires_grad_()
            y = run(x)
            y.backward(torch.ones_like(y))
            found.append([y, x.grad, *(weight.grad for weight in mlp.parameters())])
            mlp.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        for weight in mlp.parameters():
            weight.data = 2 * weight.data
        for layer in (mlp.dense_h_to_4h, mlp.dense_4h_to_h):
            assert layer.kernel.quantizations, "the layer is in FP8"
            layer.kernel.forget()


def test_small_and_unaligned_layers_stay_in_bf16() -> None:
    assert runs_in_fp8(CONFIG, 32, 64) and runs_in_fp8(CONFIG, 32, 64, (1, 4))
    assert not runs_in_fp8(CONFIG, 32, 64, (1, 8)), "8 outputs of a rank"
    assert not runs_in_fp8(CONFIG, 40, 64) and not runs_in_fp8(CONFIG, 64, 40)
    assert not runs_in_fp8(config_of("hybrid", "rowwise"), 1024, 1008) and runs_in_fp8(
        config_of("e4m3", "tensorwise"), 1024, 1024
    )


def test_devices_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "8.9" in why_no_fp8(DeviceFacts("cuda", (8, 0))) and "rocm" in why_no_fp8(DeviceFacts("rocm"))
    assert not any(map(why_no_fp8, (DeviceFacts("cpu"), DeviceFacts("cuda", (8, 9)), DeviceFacts("cuda", (9, 0)))))
    check_fp8("tensorwise", 0)
    monkeypatch.setattr(extensions, "device_facts", lambda device: DeviceFacts("cuda", (8, 0)))
    with pytest.raises(ResourceError, match="this is 8.0; remove it to train in bf16"):
        check_fp8("tensorwise", 0)
    monkeypatch.undo()
    monkeypatch.setattr(extensions, "can_multiply", lambda recipe, device: False)  # as with torch 2.10 on a CPU
    with pytest.raises(ResourceError, match="--fp8-recipe rowwise: torch .* on cpu; use another recipe"):
        check_fp8("rowwise", 0)


@pytest.mark.parametrize(("is_column_parallel", "calls"), [(True, (1, 1)), (False, (2, 0))])
def test_scales_of_divided_tensors_are_shared(is_column_parallel: bool, calls: tuple[int, int]) -> None:
    """The weight's, and of a column-parallel layer the gradient's, of a row-parallel layer the input's."""
    shared: list[Tensor] = []

    def share(largest: Tensor) -> Tensor:
        shared.append(largest)
        return largest * 4

    kernel = Fp8LinearKernel(config_of("hybrid", "tensorwise"), share, is_column_parallel=is_column_parallel)
    x, weight = random(ROWS, INPUTS), random(OUTPUTS, INPUTS)
    kernel.forward(x, weight, None)
    assert shared[-1] == weight.abs().max() and len(shared) == calls[0]
    kernel.input_gradient(random(ROWS, OUTPUTS), weight)
    assert len(shared) == sum(calls)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_layers_are_one_graph(recipe: str, frozen: bool) -> None:
    found = []
    for compiled in (False, True):
        x, weight = (
            random(ROWS, INPUTS).view(2, ROWS // 2, INPUTS).requires_grad_(),
            nn.Parameter(random(OUTPUTS, INPUTS)),
        )
        weight.requires_grad_(not frozen)
        bias, function = nn.Parameter(random(OUTPUTS, seed=2)), partial(linear, kernel=kernel_of(recipe=recipe))
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        y = function(x * 1.5, weight, bias)
        y.backward(random(ROWS, OUTPUTS, seed=3).view_as(y))
        found.append([y, x.grad, weight.grad, bias.grad])
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(*found, strict=True))
