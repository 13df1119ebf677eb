"""The layers and the loss of each model."""

from collections.abc import Callable
from typing import NamedTuple

from megatron.config import ModelConfig
from megatron.config.architecture import BERT, GPT2
from megatron.model.bert import bert_layers, bert_loss
from megatron.model.containers import Layers, LossFn
from megatron.model.gpt2 import gpt2_layers, gpt2_loss
from megatron.parallel.layout import ParallelLayout


class Model(NamedTuple):
    """What makes a model of a config: the list of its layers, and what becomes of the last one's output."""

    layers: Callable[[ModelConfig, ParallelLayout], Layers]
    loss_fn: Callable[[ModelConfig, ParallelLayout], LossFn]


MODELS = {GPT2.name: Model(gpt2_layers, gpt2_loss), BERT.name: Model(bert_layers, bert_loss)}
