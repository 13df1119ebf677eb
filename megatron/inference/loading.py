"""A model to be used, on one process or cut across the ranks of a tensor group.

    source = open_source(path)                    # without torch, see source.py: config and tokenizer
    model = load_model(source, layout, "bf16")    # this rank's part, in eval mode, on its device

The two are what every tool begins with that uses a model.
"""

from dataclasses import replace

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.checkpoint.exchange.outline import WORDS
from megatron.checkpoint.exchange.reading import read_model
from megatron.config import ActivationConfig, ModelConfig
from megatron.errors import ConfigError
from megatron.inference.source import Source
from megatron.model.gpt2_model import GPT2Model
from megatron.mpu.layout import ParallelLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(source: Source, layout: ParallelLayout, dtype: str = "fp32") -> GPT2Model:
    """This rank's part of the model, in eval mode and in a type of ``DTYPES``, on the rank's device.

    Logits are [b, s, v/t]; columns from ``source.config.vocab_size`` on are padding.
    Raises ConfigError where the tensor group cannot share the model, CheckpointError where weights are not whole.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    model = GPT2Model(config, ActivationConfig(), layout)
    weights = read_model(source.found).weights
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_own_part(weights[name], name, parameter, config, layout))
    return model.to(get_accelerator().current_device_name(), DTYPES[dtype]).eval()


def config_on(config: ModelConfig, size: int, dtype: str) -> ModelConfig:
    """The same model for ``size`` tensor-parallel ranks, without kernels that training asked for.

    Raises ConfigError where so many ranks cannot share it.
    """
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"{size} tensor-parallel ranks cannot share a model of {name} {getattr(config, name)}; start a number "
                "of processes that divides it"
            )
    return replace(
        config,
        padded_vocab_size=-(-config.vocab_size // size) * size,
        dtype=dtype,
        fused_kernels="torch",
        bias_gelu_fusion=False,  # compiled anew for each length of a prompt
        bias_dropout_fusion=False,
        recomputes_attention=False,
    )


def _own_part(whole: Tensor, name: str, parameter: nn.Parameter, config: ModelConfig, layout: ParallelLayout) -> Tensor:
    if name == WORDS:
        whole = F.pad(whole[: config.vocab_size], (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    dim = getattr(parameter, "partition_dim", None)
    return whole if dim is None else whole.chunk(layout.tensor_group.size(), dim)[layout.tensor_group.rank()]
