"""Tensor-parallel layers with Megatron-LM's arguments, based on the linear operation of this suite.

The process group is implicit, or passed as ``group``. ``init_method`` draws the full weight from torch's generator,
which must have the same seed on all tensor-parallel ranks; then it is sliced: values do not depend on the number of
ranks.

t ranks of the group, i inputs, o outputs
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn import init

from megatron.parallel.tensor import layers
from megatron.parallel.tensor.deferred import DeferringModule
from megatron.parallel.tensor.linear import linear, register_group

from . import mappings
from .initialize import get_tensor_model_parallel_group, get_tensor_model_parallel_rank
from .utils import divide

InitMethod = Callable[[Tensor], Any]
"""Fills a tensor in place, like the functions of ``torch.nn.init``."""
_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
"""Parameter attributes that Megatron-LM's optimizers and checkpoints read, with their defaults."""


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Mark ``tensor`` as sharded along ``dim`` or not, also for DeepSpeed. AssertionError if it is marked already."""
    assert not any(hasattr(tensor, name) for name in _DEFAULTS), "the tensor has attributes of tensor parallelism"
    for name, value in zip(_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)
    tensor.model_parallel = is_parallel  # type: ignore[attr-defined]  # read by DeepSpeed


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark ``tensor`` as not sharded, unless it is marked already."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the tensor-parallel attributes from one tensor to another."""
    for name in (*_DEFAULTS, "model_parallel"):
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether a norm over all ranks counts ``param`` on this rank: a shard, or the copy of the first rank."""
    return getattr(param, "tensor_model_parallel", False) or get_tensor_model_parallel_rank() == 0


class LinearOutput(NamedTuple):
    """The output of a linear layer, [.., o], and its bias, which is None if it was added.

    It unpacks into both, as in Megatron-LM from 1.1; torch functions and methods use only the output, as in Megatron-LM
    1.0, which returned nothing else.
    """

    output: Tensor
    bias: Tensor | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.output, name)

    def __mul__(self, other: Any) -> Tensor:  # type: ignore[override]  # a tuple would be repeated
        return self.output * other

    def __rmul__(self, other: Any) -> Tensor:  # type: ignore[override]
        return other * self.output

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {key: _output(value) for key, value in (kwargs or {}).items()}
        return func(*map(_output, args), **kwargs)


def _output(value: Any) -> Any:
    return value.output if isinstance(value, LinearOutput) else value


class _Linear(DeferringModule):
    """Base class of both linear layers, with a weight sharded along ``dim`` and a bias."""

    def __init__(
        self, input_size: int, output_size: int, dim: int, has_bias: bool, init_method: InitMethod, stride: int,
        keep_master_weight_for_test: bool, skip_bias_add: bool, group: ProcessGroup | None,
    ):  # fmt: skip
        super().__init__()
        self.group = group or get_tensor_model_parallel_group()
        register_group(self.group)
        self.skip_bias_add = skip_bias_add
        sizes = [output_size, input_size]
        self.input_size, self.output_size = input_size, output_size
        sizes[dim] = divide(sizes[dim], self.group.size())
        self.output_size_per_partition, self.input_size_per_partition = sizes
        self.weight = nn.Parameter(torch.empty(sizes))
        master = _initialize_affine_weight(
            self.weight, output_size, input_size, sizes[dim], dim, init_method, stride, True, self.group
        )
        self.master_weight = master if keep_master_weight_for_test else None
        self.bias = nn.Parameter(torch.zeros(sizes[0])) if has_bias else None
        if self.bias is not None and dim == 0:
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)


class ColumnParallelLinear(_Linear):
    """Column-parallel linear layer, y = x W^T + b: [.., i] -> [.., o], or [.., o/t] without ``gather_output``.

    With ``skip_bias_add`` the bias is returned and not added. ``stride`` is the number of matrices in W, which are
    sharded separately. ``keep_master_weight_for_test`` keeps the full W as ``master_weight``.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_, stride: int = 1, keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False, *, group: ProcessGroup | None = None,
    ):  # fmt: skip
        super().__init__(
            input_size, output_size, 0, bias, init_method, stride, keep_master_weight_for_test, skip_bias_add, group
        )
        self.gather_output = gather_output

    def forward(self, input_: Tensor) -> LinearOutput:
        added = None if self.skip_bias_add else self.bias
        y = linear(_output(input_), self.weight, added, self.group, deferred=self.deferred)
        if self.gather_output:
            y = mappings.gather_from_tensor_model_parallel_region(y, self.group)
        return LinearOutput(y, self.bias if self.skip_bias_add else None)


class RowParallelLinear(_Linear):
    """Row-parallel linear layer, y = x W^T + b: [.., i] -> [.., o], or from [.., i/t] with ``input_is_parallel``.

    The other arguments are the same as in ``ColumnParallelLinear``.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_, stride: int = 1, keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False, *, group: ProcessGroup | None = None,
    ):  # fmt: skip
        super().__init__(
            input_size, output_size, 1, bias, init_method, stride, keep_master_weight_for_test, skip_bias_add, group
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, input_: Tensor) -> LinearOutput:
        x = _output(input_)
        if not self.input_is_parallel:
            x = mappings.scatter_to_tensor_model_parallel_region(x, self.group)
        y = linear(x, self.weight, None, self.group, deferred=self.deferred, sums_outputs=True)
        if self.skip_bias_add or self.bias is None:
            return LinearOutput(y, self.bias)
        return LinearOutput(y + self.bias, None)


class VocabParallelEmbedding(layers.VocabParallelEmbedding):
    """Embedding sharded along the vocabulary: tokens [b, s] -> hidden [b, s, h]. AssertionError if not divisible."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, init_method: InitMethod = init.xavier_normal_,
        *, group: ProcessGroup | None = None,
    ):  # fmt: skip
        group = group or get_tensor_model_parallel_group()
        divide(num_embeddings, group.size())
        super().__init__(num_embeddings, embedding_dim, group=group, init=_Drawn(init_method))  # type: ignore[arg-type]
        del self.weight.partition_dim  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)


class ParallelEmbedding(nn.Module):
    """Embedding sharded along the hidden size, from Megatron-LM 1.0: tokens [b, s] -> hidden [b, s, h]."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, init_method: InitMethod = init.xavier_normal_,
        keep_master_weight_for_test: bool = False, *, group: ProcessGroup | None = None,
    ):  # fmt: skip
        super().__init__()
        self.group = group or get_tensor_model_parallel_group()
        columns = divide(embedding_dim, self.group.size())
        self.weight = nn.Parameter(torch.empty(num_embeddings, columns))
        master = _initialize_affine_weight(
            self.weight, num_embeddings, embedding_dim, columns, 1, init_method, 1, True, self.group
        )
        self.master_weight = master if keep_master_weight_for_test else None

    def forward(self, input_: Tensor) -> Tensor:
        return mappings.gather_from_tensor_model_parallel_region(F.embedding(input_, self.weight), self.group)


class _Drawn(NamedTuple):
    """Adapts an ``init_method`` to the interface of ``WeightInit``."""

    init_method: InitMethod

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        weight = torch.empty(shape)
        self.init_method(weight)
        return weight


def _initialize_affine_weight(
    weight: Tensor, output_size: int, input_size: int, per_partition_size: int, partition_dim: int,
    init_method: InitMethod, stride: int = 1, return_master_weight: bool = False, group: ProcessGroup | None = None,
) -> Tensor | None:  # fmt: skip
    """Draw a full weight [o, i] and copy this rank's slice along ``partition_dim`` into ``weight``.

    With a stride, a slice is taken from each of ``stride`` parts. Returns the full weight on request.
    """
    group = group or get_tensor_model_parallel_group()
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    master = torch.empty(output_size, input_size, dtype=weight.dtype)
    init_method(master)
    parts = master.split(divide(per_partition_size, stride), dim=partition_dim)
    with torch.no_grad():
        weight.copy_(torch.cat(parts[group.rank() :: group.size()], dim=partition_dim))
    return master if return_master_weight else None
