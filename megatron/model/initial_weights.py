"""How each weight begins: normal, and narrower where a layer writes to the residual stream."""

import math

from deepspeed.accelerator import get_accelerator

from megatron.config import ModelConfig
from megatron.parallel.tensor.layers import WeightInit


def weight(config: ModelConfig, name: str) -> WeightInit:
    """Normal with deviation ``init_method_std``."""
    device = "cpu" if config.use_cpu_initialization else get_accelerator().current_device_name()
    return WeightInit(config.init_method_std, config.seed, name, device)


def residual_weight(config: ModelConfig, name: str) -> WeightInit:
    """Narrower by sqrt(2 x layers), so that the residual stream does not widen with depth (GPT-2, section 2.3)."""
    whole = weight(config, name)
    return WeightInit(whole.std / math.sqrt(2 * config.num_layers), whole.seed, name, whole.device)
