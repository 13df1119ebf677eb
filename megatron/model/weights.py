"""Building blocks of layers: weight initialization, tensor-parallel linear layers with adapters, and norms.

i inputs, o outputs (both unsharded), t tensor-parallel size
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.ops.choices import runs_in_fp8
from megatron.ops.fp8 import Fp8LinearKernel
from megatron.ops.linear import LinearKernel, linear_kernel
from megatron.ops.norm import choose_norm
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_parallel_dim
from megatron.parallel.tensor.chunks import BY_RANK, CHUNKS
from megatron.parallel.tensor.layers import (
    ColumnParallelLinear,
    LinearOptions,
    RowParallelLinear,
    WeightInit,
    sharded_norm,
)
from megatron.parallel.tensor.lora import LowRank, ParallelAdapter
from megatron.parallel.tensor.mappings import largest_of_ranks


def weight(config: ModelConfig, name: str) -> WeightInit:
    """Normal initialization with standard deviation ``init_method_std``."""
    device = "cpu" if config.use_cpu_initialization else get_accelerator().current_device_name()
    return WeightInit(config.init_method_std, config.seed, name, device)


def residual_weight(config: ModelConfig, name: str) -> WeightInit:
    """Initialization scaled by 1 / sqrt(2 x layers), for projections to the residual stream (GPT-2, section 2.3).

    For an encoder and a decoder they are the layers of the encoder, as in Megatron-LM.
    """
    init = weight(config, name)
    return replace(init, std=init.std / math.sqrt(2 * (config.encoder_num_layers or config.num_layers)))


def column_parallel(
    config: ModelConfig, layout: ParallelLayout, name: str, inputs: int, outputs: int, *,
    has_bias: bool | None = None, parts: int = 1, activation: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> ColumnParallelLinear:  # fmt: skip
    """Column-parallel layer ``name``, such as ``layers.1.mlp.dense_h_to_4h``: [.., i] -> [.., parts x o/t]."""
    init, has_bias = weight(config, name), config.linear_bias if has_bias is None else has_bias
    options = _options(config, layout, init, inputs, outputs, is_column_parallel=True, parts=parts)
    return ColumnParallelLinear(
        inputs, outputs, init=init, has_bias=has_bias, parts=parts, activation=activation, **options
    )


def row_parallel(
    config: ModelConfig, layout: ParallelLayout, name: str, inputs: int, outputs: int
) -> RowParallelLinear:
    """Row-parallel layer ``name``, a projection to the residual stream: [.., i/t] -> [.., o]."""
    init = residual_weight(config, name)
    options = _options(config, layout, init, inputs, outputs, is_column_parallel=False)
    return RowParallelLinear(inputs, outputs, init=init, has_bias=config.linear_bias, **options)


def _options(
    config: ModelConfig, layout: ParallelLayout, init: WeightInit, inputs: int, outputs: int, *,
    is_column_parallel: bool, parts: int = 1,
) -> LinearOptions:  # fmt: skip
    """Arguments of a linear layer of these unsharded sizes: group, adapter (or None), bf16 or FP8, and overlap."""
    group, sequence_dim, lora = layout.tensor_group, sequence_parallel_dim(config, layout), None
    if init.name.rpartition(".")[2] in config.adapted:
        lora = ParallelAdapter(
            inputs, outputs, is_column_parallel=is_column_parallel, parts=parts, group=group, init=init,
            settings=LowRank(config.lora_rank, config.lora_alpha / config.lora_rank, config.lora_dropout),
            sequence_dim=sequence_dim,
        )  # fmt: skip
    t, chunks = group.size(), layout.forward_chunks
    kernel: Callable[[], LinearKernel] = linear_kernel(config)
    if runs_in_fp8(config, inputs, parts * outputs, (1, t) if is_column_parallel else (t, 1)):
        share = partial(largest_of_ranks, group=group)
        kernel = partial(Fp8LinearKernel, config, share, is_column_parallel=is_column_parallel)
        chunks = CHUNKS if chunks == BY_RANK else chunks
        if config.fp8_recipe == "tensorwise" and not is_column_parallel:
            chunks = 1  # the all-reduce of the input's FP8 scale would wait for the previous chunk
    return {"group": group, "sequence_dim": sequence_dim, "lora": lora, "kernel": kernel, "chunks": chunks}


def hidden_norm(config: ModelConfig, layout: ParallelLayout) -> nn.Module:
    """A norm of hidden states [.., h].

    With sequence parallelism its gradients, each from a shard of the sequence, are summed over the tensor group.
    """
    norm = choose_norm(config, fp32_residual=config.fp32_residual_connection)
    built = norm(config.hidden_size, eps=config.layernorm_epsilon)
    return sharded_norm(built, layout.tensor_group) if layout.sequence_parallel else built


def head_norm(config: ModelConfig, layout: ParallelLayout) -> nn.Module:
    """QK-norm: a norm of each head's queries or keys [.., d]; gradients are summed over the tensor group's heads."""
    norm = choose_norm(config, fp32_residual=False)
    return sharded_norm(norm(config.head_size, eps=config.layernorm_epsilon), layout.tensor_group)
