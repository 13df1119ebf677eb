"""Linear layers of a model: sharded over the tensor group, with their initial weights and their adapters.

i inputs, o outputs, in all ranks together
"""

from typing import Any

from megatron.config import ModelConfig
from megatron.model.weights import adapter, residual_weight, weight
from megatron.ops.linear import linear_kernel
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_parallel_dim
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.lora import ColumnParallelAdapter, RowParallelAdapter


def column_parallel(
    config: ModelConfig, layout: ParallelLayout, name: str, inputs: int, outputs: int, *,
    has_bias: bool | None = None, parts: int = 1, **options: Any,
) -> ColumnParallelLinear:  # fmt: skip
    """The layer ``name``, such as ``layers.1.mlp.dense_h_to_4h``: [.., i] -> [.., parts x o/t]."""
    kwargs: dict[str, Any] = {
        "group": layout.tensor_group,
        "sequence_dim": sequence_parallel_dim(config, layout),
        "init": weight(config, name),
        "parts": parts,
    }
    lora = adapter(config, name.rpartition(".")[2], ColumnParallelAdapter, inputs, outputs, **kwargs)
    kwargs |= {"has_bias": config.linear_bias if has_bias is None else has_bias, "kernel": linear_kernel(config)}
    return ColumnParallelLinear(inputs, outputs, lora=lora, **kwargs, **options)


def row_parallel(
    config: ModelConfig, layout: ParallelLayout, name: str, inputs: int, outputs: int
) -> RowParallelLinear:
    """The layer ``name``, which writes to the residual stream: [.., i/t] -> [.., o]."""
    kwargs: dict[str, Any] = {
        "group": layout.tensor_group,
        "sequence_dim": sequence_parallel_dim(config, layout),
        "init": residual_weight(config, name),
    }
    lora = adapter(config, name.rpartition(".")[2], RowParallelAdapter, inputs, outputs, **kwargs)
    kwargs |= {"has_bias": config.linear_bias, "kernel": linear_kernel(config)}
    return RowParallelLinear(inputs, outputs, lora=lora, **kwargs)
