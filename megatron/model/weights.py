"""What the layers of a model have in common: initial values of weights, adapters, norms."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import nn

from megatron.config import ModelConfig
from megatron.ops.norm import choose_norm
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import WeightInit, sharded_norm
from megatron.parallel.tensor.lora import LowRank


def weight(config: ModelConfig, name: str) -> WeightInit:
    """Normal with deviation ``init_method_std``."""
    device = "cpu" if config.use_cpu_initialization else get_accelerator().current_device_name()
    return WeightInit(config.init_method_std, config.seed, name, device)


def residual_weight(config: ModelConfig, name: str) -> WeightInit:
    """Deviation divided by sqrt(2 x layers), for weights that write to the residual stream (GPT-2, section 2.3)."""
    undivided = weight(config, name)
    return replace(undivided, std=undivided.std / math.sqrt(2 * config.num_layers))


def adapter(
    config: ModelConfig, target: str, kind: Callable[..., nn.Module], *sizes: int, **arguments: Any
) -> nn.Module | None:
    """The adapter of the linear layer ``target``, made as ``kind(*sizes, **arguments)``; None if it has none."""
    if target not in config.adapted:
        return None
    settings = LowRank(config.lora_rank, config.lora_alpha / config.lora_rank, config.lora_dropout)
    return kind(*sizes, settings=settings, **arguments)


def norm_class(config: ModelConfig, layout: ParallelLayout) -> type[nn.Module]:
    """The norm of hidden states between layers, created from (size, eps=...).

    With sequence parallelism each rank's gradient is of its shard of the sequence, and is summed over the tensor group.
    """
    norm = choose_norm(config, fp32_residual=config.fp32_residual_connection)
    return sharded_norm(norm, layout.tensor_group) if layout.sequence_parallel else norm


def head_norm_class(config: ModelConfig, layout: ParallelLayout) -> type[nn.Module]:
    """The norm of each head's queries or keys. A rank has its own heads, so that gradients are summed."""
    return sharded_norm(choose_norm(config, fp32_residual=False), layout.tensor_group)
