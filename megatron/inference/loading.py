"""A model to be used, on one process or cut across the ranks of a tensor group.

    source = open_source(path)                    # without torch, see source.py: config and tokenizer
    model = load_model(source, layout, "bf16")    # this rank's part, in eval mode, on its device

The two are what every tool begins with that uses a model.
"""

from typing import TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.checkpoint.exchange.outline import WORDS
from megatron.checkpoint.exchange.reading import read_model
from megatron.config import ActivationConfig, ModelConfig
from megatron.inference.source import Source, config_on
from megatron.model.gpt2_model import GPT2Model
from megatron.mpu.layout import ParallelLayout

Module = TypeVar("Module", bound=nn.Module)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(source: Source, layout: ParallelLayout, dtype: str = "fp32") -> GPT2Model:
    """This rank's part of the model, in eval mode and in a type of ``DTYPES``, on the rank's device.

    Logits are [b, s, v/t]; columns from ``source.config.vocab_size`` on are padding.
    Raises ConfigError where the tensor group cannot share the model, CheckpointError where weights are not whole.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    return fill(GPT2Model(config, ActivationConfig(), layout), source, config, layout)


def fill(model: Module, source: Source, config: ModelConfig, layout: ParallelLayout) -> Module:
    """``model``, which was made from ``config`` and holds any of its layers, with its weights, as ``load_model`` says.

    Raises CheckpointError where weights are not whole.
    """
    weights = read_model(source.found).weights
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_own_part(weights[name], name, parameter, config, layout))
    return model.to(get_accelerator().current_device_name(), DTYPES[config.dtype]).eval()


def _own_part(whole: Tensor, name: str, parameter: nn.Parameter, config: ModelConfig, layout: ParallelLayout) -> Tensor:
    if name == WORDS:
        whole = F.pad(whole[: config.vocab_size], (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    dim = getattr(parameter, "partition_dim", None)
    return whole if dim is None else whole.chunk(layout.tensor_group.size(), dim)[layout.tensor_group.rank()]
