"""Layers whose weights are sharded over a process group.

t ranks of the group, i inputs, o outputs, v rows of the embedding, h hidden

Between layers every rank holds full hidden states; with ``sequence_dim`` it holds its shard along that
dimension, such as [b, s/t, ..] for 1.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.ops.linear import LinearKernel
from megatron.parallel.tensor.deferred import DeferringModule
from megatron.parallel.tensor.linear import linear, register_group
from megatron.parallel.tensor.mappings import (
    all_reduce,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


@dataclass(frozen=True)
class WeightInit:
    """Initial values of one weight: normal with deviation ``std``, from a random stream of its own.

    The stream follows from ``seed`` and ``name``, which is unique in the model. ``device`` is where the numbers are
    drawn: CPU and GPU draw different ones from the same seed.
    """

    std: float
    seed: int
    name: str
    device: str = "cpu"

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """The unsharded weight in fp32; on the meta device only its shape."""
        if torch.get_default_device().type == "meta":
            return torch.empty(shape, dtype=torch.float32)
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # torch.normal and no empty().normal_(): inside zero.Init DeepSpeed makes the latter draw in half precision.
        return torch.normal(0.0, self.std, shape, generator=generator, device=self.device, dtype=torch.float32)


def sharded_parameter(full: Tensor, *, dim: int, group: ProcessGroup) -> nn.Parameter:
    """This rank's slice of ``full`` along ``dim``, marked as one."""
    part = full.chunk(group.size(), dim)[group.rank()].clone()
    return mark_sharded(nn.Parameter(part), dim)


def mark_sharded(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    """Mark ``parameter`` as a shard along ``dim``.

    DeepSpeed sums the gradient norms of parameters marked ``model_parallel`` over the tensor
    group, and counts all others once; checkpoints are merged along ``partition_dim``.
    """
    parameter.model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's mark
    parameter.partition_dim = dim  # type: ignore[attr-defined]  # Megatron's mark
    return parameter


class _GradientSum:
    """A hook that sums a gradient over ``group``. A deferred gradient comes later; until then there is None."""

    def __init__(self, group: ProcessGroup):
        self.group = group

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else all_reduce(gradient, self.group)


def all_reduce_gradient(parameter: nn.Parameter, group: ProcessGroup) -> nn.Parameter:
    """Register a hook that sums the gradient of ``parameter`` over ``group``, until ``take_gradient_sums`` removes it.

    For a replicated parameter that each rank applies to its shard of the sequence. The sum precedes DeepSpeed's own
    hooks at every ZeRO stage, and the accumulation of gradients.
    """
    if group.size() > 1:
        parameter.register_hook(_GradientSum(group))
    return parameter


def take_gradient_sums(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> list[nn.Parameter]:
    """The ``parameters`` whose gradients are summed over ``group``, without hooks from now on: the caller sums them."""
    taken = []
    for parameter in parameters:
        hooks = parameter._backward_hooks or {}
        for number in [key for key, hook in hooks.items() if isinstance(hook, _GradientSum) and hook.group is group]:
            del hooks[number]
            taken.append(parameter)
    return taken


def reduce_output(x: Tensor, group: ProcessGroup, sequence_dim: int | None) -> Tensor:
    """The sum of the ranks' partial outputs, on every rank or sharded along the sequence."""
    if sequence_dim is None:
        return reduce_from_model_parallel_region(x, group)
    return reduce_scatter_to_sequence_parallel_region(x, group, sequence_dim)


def sharded_norm(norm: nn.Module, group: ProcessGroup) -> nn.Module:
    """``norm`` for a rank's part of the sequence or of the heads: gradients of its replicated weights are summed."""
    for parameter in norm.parameters():
        all_reduce_gradient(parameter, group)
    return norm


class ColumnParallelLinear(DeferringModule):
    """y = x W^T + b with W sharded by rows (outputs): [.., i] -> [.., o/t].

    ``activation(y, bias)`` replaces the addition of the bias, for a fused kernel. The output of ``lora(x)``, an adapter
    of the same layout, is added. With ``parts`` there are that many matrices, each
    of which is sharded, W [parts, o, i]; their outputs are concatenated, [.., parts x o/t]. ``kernel`` computes the
    matmuls, whose input is gathered in ``chunks``, or ``BY_RANK``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        init: WeightInit,
        has_bias: bool = True,
        parts: int = 1,
        activation: Callable[[Tensor, Tensor], Tensor] | None = None,
        sequence_dim: int | None = None,
        lora: nn.Module | None = None,
        kernel: Callable[[], LinearKernel] = LinearKernel,
        chunks: int = 1,
    ):
        super().__init__()
        self.group = group
        self.sequence_dim = sequence_dim
        self.kernel = kernel()
        self.chunks = chunks
        register_group(group)
        self.activation = activation
        more = () if parts == 1 else (parts,)
        self.weight = sharded_parameter(init.draw((*more, output_size, input_size)), dim=len(more), group=group)
        self.bias = None
        if has_bias:
            self.bias = mark_sharded(nn.Parameter(torch.zeros(*more, output_size // group.size())), dim=len(more))
        self.lora = lora

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.flatten(0, -2), None if self.bias is None else self.bias.flatten()
        is_fused = self.activation is not None and bias is not None
        y = linear(
            x,
            weight,
            None if is_fused else bias,
            self.group,
            self.sequence_dim,
            kernel=self.kernel,
            deferred=self.deferred,
            chunks=self.chunks,
        )
        if self.lora is not None:
            y = y + self.lora(x)
        if self.activation is not None and bias is not None:
            y = self.activation(y, bias)
        return y


class RowParallelLinear(DeferringModule):
    """y = x W^T + b with W sharded by columns (inputs): [.., i/t] -> [.., o].

    The output of ``lora(x)``, if given, is added. ``kernel`` computes the matmul, whose output is summed in
    ``chunks``, or ``BY_RANK``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        init: WeightInit,
        has_bias: bool = True,
        sequence_dim: int | None = None,
        lora: nn.Module | None = None,
        kernel: Callable[[], LinearKernel] = LinearKernel,
        chunks: int = 1,
    ):
        super().__init__()
        self.group = group
        self.sequence_dim = sequence_dim
        self.kernel = kernel()
        self.chunks = chunks
        register_group(group)
        self.weight = sharded_parameter(init.draw((output_size, input_size)), dim=1, group=group)
        self.bias = nn.Parameter(torch.zeros(output_size)) if has_bias else None
        if self.bias is not None and sequence_dim is not None:
            all_reduce_gradient(self.bias, group)
        self.lora = lora

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.group.size() == 1 else None  # otherwise it is added to the ranks' sum
        y = linear(
            x,
            self.weight,
            bias,
            self.group,
            self.sequence_dim,
            kernel=self.kernel,
            deferred=self.deferred,
            sums_outputs=True,
            chunks=self.chunks,
        )
        if self.bias is not None and bias is None:
            y = y + self.bias
        return y if self.lora is None else y + self.lora(x)


class VocabParallelEmbedding(nn.Module):
    """A table sharded by rows: tokens [b, s] -> hidden [b, s, h], and back to logits [b, s, v/t].

    ``padded_size`` rows are stored; those from ``num_embeddings`` on are zero and never looked up.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padded_size: int | None = None,
        group: ProcessGroup,
        init: WeightInit,
        sequence_dim: int | None = None,
        kernel: Callable[[], LinearKernel] = LinearKernel,
    ):
        super().__init__()
        self.group = group
        self.sequence_dim = sequence_dim
        full = init.draw((num_embeddings, embedding_dim))  # before padding, which depends on the layout
        full = F.pad(full, (0, 0, 0, (padded_size or num_embeddings) - num_embeddings))
        self.rows = full.size(0) // group.size()
        self.weight = sharded_parameter(full, dim=0, group=group)
        self.kernel = kernel()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.rows * self.group.rank()
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_output(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group, self.sequence_dim)

    def logits(self, hidden: Tensor) -> Tensor:
        """The table as the output projection: hidden [b, s, h] -> logits [b, s, v/t]."""
        return linear(hidden, self.weight, None, self.group, self.sequence_dim, kernel=self.kernel)
