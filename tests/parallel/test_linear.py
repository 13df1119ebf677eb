"""Gradients that a matmul accumulates, deferred ones, and what a tensor-parallel layer saves and sends."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.saved_tensors import saved_bytes
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.weights import column_parallel, row_parallel
from megatron.ops.fp8 import Fp8LinearKernel
from megatron.ops.linear import AccumulatingLinearKernel, LinearKernel
from megatron.parallel import layout as layouts
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.process_groups import maps_memory
from megatron.parallel.tensor.chunks import BY_RANK
from megatron.parallel.tensor.chunks import CHUNKS as ALL_CHUNKS
from megatron.parallel.tensor.deferred import DeferredWeightGradients, compute_weight_gradients
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, WeightInit
from megatron.parallel.tensor.linear import linear

CHUNKS = (1, 2, 4)
"""None, unequal ones, and more than there are tokens."""
SEQUENCE_DIMS = [None, 0, 1]
"""Without sequence parallelism, and with it for hidden states [s, b, h] and [b, s, h]."""


@pytest.mark.parametrize("bias", [False, True])
def test_micro_batches_add_up_in_place(bias: bool):
    """The same sum as autograd's, but hooks receive only the first micro-batch's gradient."""
    torch.manual_seed(1)
    plain, fused = nn.Linear(5, 3, bias=bias), nn.Linear(5, 3, bias=bias)
    fused.load_state_dict(plain.state_dict())
    kernels = LinearKernel(), AccumulatingLinearKernel()
    seen: list[torch.Tensor | None] = []
    fused.weight.register_hook(seen.append)
    for _ in range(3):
        inputs = [torch.randn(2, 4, 5).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        for layer, x, kernel in zip((plain, fused), inputs, kernels, strict=True):
            linear(x, layer.weight, layer.bias, kernel=kernel).square().sum().backward()
        assert_close(inputs[1].grad, inputs[0].grad)
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert_close(other.grad, one.grad)
    assert [gradient is not None for gradient in seen] == [True, False, False]


def _column(
    sequence_dim: int | None, kernel: type[LinearKernel] = LinearKernel, chunks: int = 1
) -> tuple[ColumnParallelLinear, nn.Linear, torch.Tensor, torch.Tensor]:
    """A column-parallel layer, the same layer on one process, this rank's input, and the whole of it."""
    init = WeightInit(std=0.3, seed=7, name="column")
    column = ColumnParallelLinear(
        8, 12, group=dist.group.WORLD, init=init, sequence_dim=sequence_dim, kernel=kernel, chunks=chunks
    )
    serial = nn.Linear(8, 12)
    with torch.no_grad():
        serial.weight.copy_(init.draw((12, 8)))
        column.bias.copy_(_part(serial.bias.copy_(torch.linspace(-1, 1, 12)), 0))
    whole = torch.randn((4, 6, 8), generator=torch.Generator().manual_seed(3))
    part = whole.clone() if sequence_dim is None else _part(whole, sequence_dim).clone()
    return column, serial, part.requires_grad_(), whole.requires_grad_()


def _part(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


@pytest.mark.parametrize("sequence_dim", SEQUENCE_DIMS)
@pytest.mark.ranks(2)
def test_layers_equal_serial_ones(sequence_dim: int | None) -> None:
    column_parallel_equals_serial(sequence_dim)
    row_parallel_equals_serial(sequence_dim)


def row_parallel_equals_serial(sequence_dim: int | None, all_chunks: tuple[int, ...] = CHUNKS):
    """Output and the gradients of input and weight; the sums do not overwrite what the backward pass needs."""
    for kernel, chunks, is_compiling in product((LinearKernel, AccumulatingLinearKernel), all_chunks, (False, True)):
        row, serial, x, x_serial = _row(sequence_dim, kernel, chunks)
        for _ in range(2):
            with patch.object(torch.compiler, "is_compiling", return_value=is_compiling):
                y, y_serial = row(x), serial(x_serial)
            assert_close(y, y_serial if sequence_dim is None else _part(y_serial, sequence_dim))
            y.square().sum().backward()
            y_serial.square().sum().backward()
        assert_close(x.grad, _part(x_serial.grad, -1))
        assert_close(row.weight.grad, _part(serial.weight.grad, 1))
        assert_close(row.bias.grad, serial.bias.grad)


def _row(
    sequence_dim: int | None, kernel: type[LinearKernel] = LinearKernel, chunks: int = 1
) -> tuple[RowParallelLinear, nn.Linear, torch.Tensor, torch.Tensor]:
    """A row-parallel layer, the same layer on one process, this rank's input, and the whole of it."""
    init = WeightInit(std=0.3, seed=7, name="row")
    row = RowParallelLinear(
        8, 12, group=dist.group.WORLD, init=init, sequence_dim=sequence_dim, kernel=kernel, chunks=chunks
    )
    serial = nn.Linear(8, 12)
    with torch.no_grad():
        serial.weight.copy_(init.draw((12, 8)))
        row.bias.copy_(serial.bias.copy_(torch.linspace(-1, 1, 12)))
    whole = torch.randn((4, 6, 8), generator=torch.Generator().manual_seed(3))
    return row, serial, _part(whole, -1).clone().requires_grad_(), whole.requires_grad_()


@pytest.mark.parametrize("sequence_dim", SEQUENCE_DIMS)
@pytest.mark.ranks(2)
def test_the_compilers_operator_equals_serial(sequence_dim: int | None) -> None:
    """And its results have the shapes that the compiler expects."""
    column, _, x, _ = _column(sequence_dim)
    row, _, x_of_row, _ = _row(sequence_dim)
    for layer, layer_input, sums_outputs in ((column, x, False), (row, x_of_row, True)):
        place = (dist.group.WORLD.group_name, sequence_dim, sums_outputs)
        inputs = (layer_input, layer.weight, None, *place, 2)
        backward = (layer(layer_input).detach(), layer_input.detach(), layer.weight.detach(), [True] * 3, *place)
        for operator, arguments in (
            (torch.ops.megatron.linear, inputs),
            (torch.ops.megatron.linear_backward, backward),
        ):
            torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        column_parallel_equals_serial(sequence_dim, (LinearKernel,))
        kept, size = bytes_kept(sequence_dim)
        assert kept == size


def column_parallel_equals_serial(
    sequence_dim: int | None,
    kernels: tuple[type[LinearKernel], ...] = (LinearKernel, AccumulatingLinearKernel),
    all_chunks: tuple[int, ...] = CHUNKS,
):
    """Output and the gradients of input, weight and bias, accumulated by autograd and in place."""
    for kernel, chunks in product(kernels, all_chunks):
        column, serial, x, x_serial = _column(sequence_dim, kernel, chunks)
        for _ in range(2):
            y, y_serial = column(x), serial(x_serial)
            assert_close(y, _part(y_serial, -1))
            y.square().sum().backward()
            y_serial.square().sum().backward()
        expected = x_serial.grad if sequence_dim is None else _part(x_serial.grad, sequence_dim)
        assert_close(x.grad, expected)
        assert_close(column.weight.grad, _part(serial.weight.grad, 0))
        assert_close(column.bias.grad, _part(serial.bias.grad, 0))


@contextmanager
def _symmetric_memory() -> Iterator[None]:
    """Torch's matmuls through symmetric memory on a CPU: its own reference versions of them."""
    from torch.distributed import _symmetric_memory as symm_mem

    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl("fused_all_gather_matmul", symm_mem._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", symm_mem._fused_matmul_reduce_scatter_fallback, "CPU")
        yield


@pytest.mark.parametrize("sequence_dim", SEQUENCE_DIMS[1:])
@pytest.mark.ranks(2)
def test_symmetric_memory_equals_serial(sequence_dim: int) -> None:
    """Output and gradients, also of the compiler's operator; all messages of the forward pass are in torch's."""
    with _symmetric_memory():
        row_parallel_equals_serial(sequence_dim, (BY_RANK,))
        column_parallel_equals_serial(sequence_dim, all_chunks=(BY_RANK,))
        with patch.object(torch.compiler, "is_compiling", return_value=True):
            column_parallel_equals_serial(sequence_dim, (LinearKernel,), (BY_RANK,))
    for build in (_column, _row):
        layer, _, x, _ = build(sequence_dim, chunks=BY_RANK)
        with _symmetric_memory(), _Events() as events:
            layer(x)
        assert events.found == []


@pytest.mark.ranks(2)
def test_symmetric_memory_is_chosen_where_ranks_can_map_it() -> None:
    """On a device that has none, of several hosts, without sequence parallelism, and in FP8: chunks as elsewhere.

    But no chunks of an input whose scale the ranks share.
    """
    assert not maps_memory(dist.group.WORLD, "cpu")
    assert not maps_memory(dist.group.WORLD, "cuda"), "this torch has no CUDA"
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 8}
    fp8 = {"dtype": "bf16", "fp8_format": "hybrid", "fp8_min_size": 16}
    found = []
    for works, is_sharded, more in product((True, False), (True, False), ({}, fp8)):
        parallel = ParallelConfig(
            world_size=2, model_parallel_size=2, sequence_parallel=is_sharded, tp_comm_overlap=True
        )
        with patch.object(layouts, "maps_memory", return_value=works):
            layout = ParallelLayout.create(parallel)
        config = ModelConfig(**sizes, **more)
        layers = [build(config, layout, "a.b", 32, 64) for build in (column_parallel, row_parallel)]
        assert all(isinstance(layer.kernel, Fp8LinearKernel) == bool(more) for layer in layers)
        found.append([layer.chunks for layer in layers])
    assert found == [[BY_RANK] * 2, *[[ALL_CHUNKS, 1], [ALL_CHUNKS] * 2] * 3, [ALL_CHUNKS, 1]]


class _Events(TorchDispatchMode):
    """Matmuls and messages in order; ``wait`` where a message is waited for."""

    MESSAGES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")

    def __init__(self, clone: bool = False):
        super().__init__()
        self.found: list[str] = []
        self._names = dict.fromkeys((torch.ops.aten.mm.default, torch.ops.aten.addmm.default), "matmul")
        self._names |= {torch.ops.aten.clone.default: "clone"} if clone else {}
        self._patches = [patch.object(dist, name, self._recorded(name)) for name in self.MESSAGES]

    def _recorded(self, name: str):
        function = getattr(dist, name)

        def call(*arguments, **options):
            work = function(*arguments, **options)
            self.found.append(name)
            return self._Waited(work, self.found, name) if work is not None else None

        return call

    class _Waited:
        def __init__(self, work: dist.Work, found: list[str], name: str):
            self._work, self._found, self._name = work, found, name

        def wait(self):
            self._found.append(f"wait for {self._name}")
            return self._work.wait()

    def __enter__(self):
        for one in self._patches:
            one.start()
        return super().__enter__()

    def __exit__(self, *error):
        for one in self._patches:
            one.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function in self._names:
            self.found.append(self._names[function])
        return function(*arguments, **(options or {}))


GATHER, SCATTER, REDUCE = _Events.MESSAGES


@pytest.mark.parametrize("sequence_dim", SEQUENCE_DIMS)
@pytest.mark.ranks(2)
def test_the_backward_pass_communicates_while_it_computes(sequence_dim: int | None) -> None:
    """It gathers during the matmul for the input's gradient, and sums that gradient during the weight's.

    Each deferred weight gradient gathers during the matmul before.
    """
    forward, backward, inputs, weights, frozen = order_of_events(sequence_dim)
    assert forward == ([] if sequence_dim is None else [GATHER]) + ["matmul"]
    if sequence_dim is None:
        assert backward == ["matmul", REDUCE, "matmul", f"wait for {REDUCE}"]
        assert frozen == inputs == ["matmul", REDUCE, f"wait for {REDUCE}"]
        assert weights == ["matmul"] * 2
    else:
        scattered = ["matmul", SCATTER, f"wait for {GATHER}", "matmul", f"wait for {SCATTER}"]
        assert backward == [GATHER, *scattered]
        assert frozen == inputs == ["matmul", SCATTER, f"wait for {SCATTER}"]
        assert weights == [GATHER, GATHER, *[f"wait for {GATHER}", "matmul"] * 2]


def order_of_events(sequence_dim: int | None) -> list[list[str]]:
    """Of the forward pass, of the backward pass, of the two parts of a divided one, and of one with a frozen weight."""
    column, _, x, _ = _column(sequence_dim)
    passes = []
    with _Events() as events:
        y = column(x)
    passes.append(events.found)
    with _Events() as events:
        y.sum().backward()
    passes.append(events.found)
    deferred, all_collected = DeferredWeightGradients(column), []
    for _ in range(2):
        y = column(x)
        with deferred.collected() as collected, _Events() as events:
            y.sum().backward()
        all_collected += collected
    passes.append(events.found)
    with _Events() as events:
        compute_weight_gradients(all_collected)
    passes.append(events.found)
    y = column.requires_grad_(False)(x)
    with _Events() as events:
        y.sum().backward()
    return [*passes, events.found]


@pytest.mark.parametrize("sequence_dim", SEQUENCE_DIMS)
@pytest.mark.ranks(2)
def test_the_forward_pass_communicates_by_chunks_while_it_computes(sequence_dim: int | None) -> None:
    """All chunks are requested at once, and each is sent as soon as it is computed; nothing is copied to be summed."""
    passes = []  # of a column-parallel and a row-parallel layer in two chunks, and of the latter in one with clones
    for build, chunks in ((_column, 2), (_row, 2), (_row, 1)):
        layer, _, x, _ = build(sequence_dim, chunks=chunks)
        with _Events(clone=chunks == 1) as events:
            layer(x)
        passes.append(events.found)
    column, row, sums = passes
    if sequence_dim is None:
        assert column == ["matmul"]
        assert row == ["matmul", REDUCE] * 2 + [f"wait for {REDUCE}"] * 2
        assert sums == ["matmul", REDUCE, f"wait for {REDUCE}"]
    else:
        assert column == [GATHER] * 2 + [f"wait for {GATHER}", "matmul"] * 2
        assert row == ["matmul", SCATTER] * 2 + [f"wait for {SCATTER}"] * 2


@pytest.mark.parametrize("sequence_dim", SEQUENCE_DIMS)
@pytest.mark.ranks(2)
def test_a_shard_is_kept_as_a_shard(sequence_dim: int | None) -> None:
    kept, size = bytes_kept(sequence_dim)
    assert kept == size == 4 * 4 * 6 * 8 // (1 if sequence_dim is None else 2)


def bytes_kept(sequence_dim: int | None) -> tuple[int, int]:
    """Bytes that the layer keeps for the backward pass besides its parameters, and those of its input."""
    column, _, x, _ = _column(sequence_dim)
    return saved_bytes(lambda: column(x), column), x.nbytes
