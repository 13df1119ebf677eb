"""Loads this rank's shard of a model for inference, and stores or packs weights in the layout fastest on a CPU."""

from functools import cached_property
from typing import TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ActivationConfig, ModelConfig
from megatron.model.architectures import architecture_of
from megatron.model.containers import SequentialModel
from megatron.model.spec import ParameterSpec
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.tools.convert.load_and_save import read_model
from megatron.tools.inference.source import Source, config_on

Module = TypeVar("Module", bound=nn.Module)
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_PACKED_ROWS = 8
"""Rows for which weights are packed; any number may be multiplied with them."""
_MOST_PACKED_ROWS = 64
"""Rows up to which the packed weights of layers are used."""
_LEAST_PACKED = 1 << 19
"""Elements of such a weight. Smaller ones stay in the processor's caches, where the other library is faster."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(source: Source, layout: ParallelLayout, dtype: str = "fp32") -> SequentialModel:
    """This rank's shard of the model, in eval mode and in a type of ``DTYPES``, on the rank's device.

    Logits are [b, s, v/t]; columns from ``source.config.vocab_size`` on are padding.
    Raises ConfigError if the tensor group cannot share the model, CheckpointError if weights are incomplete.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    spec = architecture_of(config)
    module = SequentialModel(spec.build_layers(config, layout), spec.build_loss(config, layout), ActivationConfig())
    return load_weights(module, source, config, layout)


def load_weights(model: Module, source: Source, config: ModelConfig, layout: ParallelLayout) -> Module:
    """Load the weights of ``model``, which has some or all layers of ``config``, as ``load_model`` does.

    Raises CheckpointError if weights are incomplete.
    """
    weights, specs = read_model(source.found).weights, architecture_of(config).named_parameters(config)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_local_shard(weights[name], specs[name], config, layout))
    model = model.to(get_accelerator().current_device_name(), DTYPES[config.dtype]).eval()
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            _store_by_inputs(module.weight)
            if module.group.size() == 1 and module.lora is None and getattr(module, "activation", None) is None:
                module.forward = _WholeLinear(module)  # type: ignore[method-assign]
    return model


def _store_by_inputs(weight: nn.Parameter) -> None:
    """Keep the elements of ``weight`` [.., o, i] on a CPU in the order [i, .., o]; its shape stays.

    The library that multiplies fp32 matrices reads it up to three times as fast for the few rows of generation.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        weight.data = weight.data.flatten(0, -2).t().contiguous().t().unflatten(0, weight.shape[:-1])


class _WholeLinear:
    """The forward pass of a linear layer that is whole on this rank, a product and a bias, without gradients.

    On a CPU in fp32 a packed copy of a large weight takes three quarters of the time for a few rows, such as those of
    several texts in a step. It is made when it is first used.
    """

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear):
        self._weight = layer.weight.detach().flatten(0, -2)
        self._bias = None if layer.bias is None else layer.bias.detach().flatten()
        is_fp32 = self._weight.device.type == "cpu" and self._weight.dtype == torch.float32
        self._may_pack = HAS_ONEDNN and is_fp32 and self._weight.numel() >= _LEAST_PACKED

    def __call__(self, x: Tensor) -> Tensor:
        if self._may_pack and 2 < x.numel() // x.size(-1) <= _MOST_PACKED_ROWS:
            return packed_product(x, self._packed, self._bias)
        return F.linear(x, self._weight, self._bias)

    @cached_property
    def _packed(self) -> Tensor:
        return pack(self._weight)


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., i] times a packed weight, plus the bias: [.., o]."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor:
    """weight [o, i] in the order in which oneDNN reads it for a few rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_ROWS)


def _local_shard(whole: Tensor, spec: ParameterSpec, config: ModelConfig, layout: ParallelLayout) -> Tensor:
    if spec.is_vocabulary:
        whole = F.pad(whole[: config.vocab_size], (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    dim = spec.shard_dim
    return whole if dim is None else whole.chunk(layout.tensor_group.size(), dim)[layout.tensor_group.rank()]
