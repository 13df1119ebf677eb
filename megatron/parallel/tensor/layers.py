"""Megatron's tensor-parallel layers, with weights sharded over a process group.

t ranks of the group, i inputs, o outputs, v rows of the embedding, h hidden

Between layers every rank has full hidden states or, with ``sequence_dim``, a shard along that dimension, such as
[b, s/t, ..] for 1.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Required, TypedDict, Unpack

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
    """Initialization of one weight: normal with standard deviation ``std``, from a separate random stream.

    The stream is seeded by ``seed`` and ``name``, which is unique in the model. Numbers are drawn on ``device``: CPU
    and GPU draw different ones from the same seed.
    """

    std: float
    seed: int
    name: str
    device: str = "cpu"

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Draw the unsharded weight in fp32; only its shape on the meta device."""
        if torch.get_default_device().type == "meta":
            return torch.empty(shape, dtype=torch.float32)
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # torch.normal instead of empty().normal_(), which draws in half precision inside DeepSpeed's zero.Init.
        return torch.normal(0.0, self.std, shape, generator=generator, device=self.device, dtype=torch.float32)


def sharded_parameter(full: Tensor, *, dim: int, group: ProcessGroup) -> nn.Parameter:
    """A parameter with this rank's shard of ``full`` along ``dim``, marked as sharded."""
    part = full.chunk(group.size(), dim)[group.rank()].clone()
    return mark_sharded(nn.Parameter(part), dim)


def mark_sharded(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    """Mark ``parameter`` as a shard along ``dim``.

    DeepSpeed sums the gradient norms of parameters marked ``model_parallel`` over the tensor
    group, and counts all others once; checkpoints are merged along ``partition_dim``.
    """
    parameter.model_parallel = True  # type: ignore[attr-defined]  # read by DeepSpeed
    parameter.partition_dim = dim  # type: ignore[attr-defined]  # named as in Megatron-LM
    return parameter


class _GradientSum:
    """A hook that sums a gradient over ``group``. The gradient is None if it is deferred."""

    def __init__(self, group: ProcessGroup):
        self.group = group

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else all_reduce(gradient, self.group)


def all_reduce_gradient(parameter: nn.Parameter, group: ProcessGroup) -> nn.Parameter:
    """Register a hook that sums the gradient of ``parameter`` over ``group``, until ``take_gradient_sums`` removes it.

    For replicated parameters that each rank applies to its shard of the sequence. The hook runs before DeepSpeed's
    hooks of all ZeRO stages, and before gradient accumulation.
    """
    if group.size() > 1:
        parameter.register_hook(_GradientSum(group))
    return parameter


def take_gradient_sums(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> list[nn.Parameter]:
    """Remove the hooks that sum gradients over ``group``; returns their parameters, whose gradients the caller sums."""
    taken = []
    for parameter in parameters:
        hooks = parameter._backward_hooks or {}
        for number in [key for key, hook in hooks.items() if isinstance(hook, _GradientSum) and hook.group is group]:
            del hooks[number]
            taken.append(parameter)
    return taken


def reduce_output(x: Tensor, group: ProcessGroup, sequence_dim: int | None, *, overwrites: bool = False) -> Tensor:
    """Sum the partial outputs of all ranks: all-reduce, or reduce-scatter along ``sequence_dim``.

    ``overwrites``: the all-reduce needs no other memory, as nothing else needs ``x``, in the backward pass either.
    """
    if sequence_dim is None:
        return reduce_from_model_parallel_region(x, group, overwrites=overwrites)
    return reduce_scatter_to_sequence_parallel_region(x, group, sequence_dim)


def sharded_norm(norm: nn.Module, group: ProcessGroup) -> nn.Module:
    """Prepare a replicated ``norm`` for a shard of the sequence or of the heads: its gradients are summed."""
    for parameter in norm.parameters():
        all_reduce_gradient(parameter, group)
    return norm


class LinearOptions(TypedDict, total=False):
    """Arguments that all linear layers have; see ``_ParallelLinear``."""

    group: Required[ProcessGroup]
    sequence_dim: int | None
    lora: nn.Module | None
    kernel: Callable[[], LinearKernel]
    chunks: int


class _ParallelLinear(DeferringModule):
    """Base class of linear layers whose weight is sharded over ``group``.

    ``kernel`` computes the matmuls. Communication overlaps with them in ``chunks``, or ``BY_RANK``. The output of
    ``lora(x)``, an adapter of the same layout, is added.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup,
        sequence_dim: int | None = None,
        lora: nn.Module | None = None,
        kernel: Callable[[], LinearKernel] = LinearKernel,
        chunks: int = 1,
    ):
        super().__init__()
        self.group, self.sequence_dim, self.lora = register_group(group), sequence_dim, lora
        self.kernel, self.chunks = kernel(), chunks

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, sums_outputs: bool = False) -> Tensor:
        kernel, deferred, chunks, dim = self.kernel, self.deferred, self.chunks, self.sequence_dim
        return linear(
            x, weight, bias, self.group, dim, kernel=kernel, deferred=deferred, sums_outputs=sums_outputs, chunks=chunks
        )


class ColumnParallelLinear(_ParallelLinear):
    """Column-parallel linear layer, y = x W^T + b with W sharded along the outputs: [.., i] -> [.., o/t].

    ``activation(y, bias)`` replaces the addition of the bias, for a fused kernel. With ``parts`` there are several
    matrices W [parts, o, i], each of which is sharded; their outputs are concatenated, [.., parts x o/t].
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        init: WeightInit,
        has_bias: bool = True,
        parts: int = 1,
        activation: Callable[[Tensor, Tensor], Tensor] | None = None,
        **options: Unpack[LinearOptions],
    ):
        super().__init__(**options)
        self.activation = activation
        stack, rows = () if parts == 1 else (parts,), output_size // self.group.size()
        self.weight = sharded_parameter(init.draw((*stack, output_size, input_size)), dim=len(stack), group=self.group)
        self.bias = mark_sharded(nn.Parameter(torch.zeros(*stack, rows)), dim=len(stack)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.flatten(0, -2), None if self.bias is None else self.bias.flatten()
        is_fused = self.activation is not None and bias is not None
        y = self._linear(x, weight, None if is_fused else bias)
        if self.lora is not None:
            y = y + self.lora(x)
        if self.activation is not None and bias is not None:
            y = self.activation(y, bias)
        return y


class RowParallelLinear(_ParallelLinear):
    """Row-parallel linear layer, y = x W^T + b with W sharded along the inputs: [.., i/t] -> [.., o]."""

    def __init__(
        self, input_size: int, output_size: int, *,
        init: WeightInit, has_bias: bool = True, **options: Unpack[LinearOptions],
    ):  # fmt: skip
        super().__init__(**options)
        self.weight = sharded_parameter(init.draw((output_size, input_size)), dim=1, group=self.group)
        self.bias = nn.Parameter(torch.zeros(output_size)) if has_bias else None
        if self.bias is not None and self.sequence_dim is not None:
            all_reduce_gradient(self.bias, self.group)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.group.size() == 1 else None  # otherwise it is added after the reduction
        y = self._linear(x, self.weight, bias, sums_outputs=True)
        if self.bias is not None and bias is None:
            y = y + self.bias
        return y if self.lora is None else y + self.lora(x)


class VocabParallelEmbedding(nn.Module):
    """Embedding sharded along the vocabulary: tokens [b, s] -> hidden [b, s, h], or hidden -> logits [b, s, v/t].

    It has ``padded_size`` rows; rows from ``num_embeddings`` on are zero and never looked up.
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
        full = init.draw((num_embeddings, embedding_dim))  # without padding, which depends on the layout
        full = F.pad(full, (0, 0, 0, (padded_size or num_embeddings) - num_embeddings))
        self.rows = full.size(0) // group.size()
        self.weight = sharded_parameter(full, dim=0, group=group)
        self.kernel = kernel()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.rows * self.group.rank()
        elsewhere = (local < 0) | (local >= self.rows)
        local_hidden = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        local_hidden = local_hidden.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_output(local_hidden, self.group, self.sequence_dim, overwrites=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """The embedding as output projection: hidden [b, s, h] -> logits [b, s, v/t]."""
        return linear(hidden, self.weight, None, self.group, self.sequence_dim, kernel=self.kernel)
