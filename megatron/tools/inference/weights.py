"""Loads this rank's shard of a model for inference."""

from typing import TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ActivationConfig, ModelConfig
from megatron.engines.containers import SequentialModel, sequential_model
from megatron.model.architectures import architecture_of
from megatron.model.spec import ParameterSpec
from megatron.parallel.layout import ParallelLayout
from megatron.tools.convert.load_and_save import read_model
from megatron.tools.inference.source import Source, config_on

Module = TypeVar("Module", bound=nn.Module)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(source: Source, layout: ParallelLayout, dtype: str = "fp32") -> SequentialModel:
    """This rank's shard of the model, in eval mode and in a type of ``DTYPES``, on the rank's device.

    Logits are [b, s, v/t]; columns from ``source.config.vocab_size`` on are padding.
    Raises ConfigError if the tensor group cannot share the model, CheckpointError if weights are incomplete.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    return load_weights(sequential_model(config, ActivationConfig(), layout), source, config, layout)


def load_weights(model: Module, source: Source, config: ModelConfig, layout: ParallelLayout) -> Module:
    """Load the weights of ``model``, which has some or all layers of ``config``, as ``load_model`` does.

    Raises CheckpointError if weights are incomplete.
    """
    weights, specs = read_model(source.found).weights, architecture_of(config).named_parameters(config)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_local_shard(weights[name], specs[name], config, layout))
    return model.to(get_accelerator().current_device_name(), DTYPES[config.dtype]).eval()


def _local_shard(weight: Tensor, spec: ParameterSpec, config: ModelConfig, layout: ParallelLayout) -> Tensor:
    if spec.is_vocabulary:
        weight = F.pad(weight[: config.vocab_size], (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    dim = spec.shard_dim
    return weight if dim is None else weight.chunk(layout.tensor_group.size(), dim)[layout.tensor_group.rank()]
