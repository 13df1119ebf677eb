"""A model that only runs forward: whole on each rank, cut across a tensor group, and in pipeline stages.

DeepSpeed's pipeline engine is for training: it wants an optimizer, and returns the loss alone. Forward only, a
pipeline is its container, and hidden states sent from stage to stage.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size, k tokens that are predicted
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import ActivationConfig, ModelConfig
from megatron.inference.loading import DTYPES, fill
from megatron.inference.source import Source, config_on
from megatron.model.containers import PipelinedModel, run_one_by_one
from megatron.model.embedding import document_numbers
from megatron.model.gpt2_model import GPT2Model, gpt2_layers, gpt2_loss
from megatron.model.transformer import Stream, unpack
from megatron.mpu.layout import ParallelLayout
from megatron.partition import balanced, bounds


@dataclass(frozen=True)
class ForwardModel:
    """This rank's part of a model, in eval mode and on its device."""

    module: GPT2Model | PipelinedModel
    config: ModelConfig
    layout: ParallelLayout

    def logits(self, tokens: Tensor, predicted: Tensor) -> Tensor | None:
        """Logits [1, k, v/t] of what follows the tokens [b, s] where ``predicted`` [b, s] is true, and nowhere else.

        All ranks that share the model call it alike. None on those of stages before the last.
        """
        stream = tokens if self.layout.is_first_stage else self._received(tokens)
        if not self.layout.is_last_stage:
            self._send(unpack(run_one_by_one(self.module.forward_funcs, stream))[0])
            return None
        *layers, head = self.module.forward_funcs
        sequence_dim = self.config.sequence_dim
        hidden = run_one_by_one(layers, stream).movedim(sequence_dim, 1)[predicted].unsqueeze(0)  # [1, k, h]
        return head(hidden.movedim(1, sequence_dim))

    def _received(self, tokens: Tensor) -> Stream:
        """What the stage before sends. Every stage has the tokens, so that their documents need not travel."""
        config, group = self.config, self.layout.pipe_group
        shape = tokens.shape if config.sequence_dim else tokens.t().shape
        dtype = torch.float32 if config.fp32_residual_connection else DTYPES[config.dtype]
        hidden = torch.empty(*shape, config.hidden_size, dtype=dtype, device=tokens.device)
        dist.recv(hidden, dist.get_global_rank(group, group.rank() - 1), group)
        return (hidden, document_numbers(tokens, config.eod_token)) if config.reset_attention_mask else hidden

    def _send(self, hidden: Tensor) -> None:
        group = self.layout.pipe_group
        dist.send(hidden.contiguous(), dist.get_global_rank(group, group.rank() + 1), group)


def open_forward(source: Source, layout: ParallelLayout, dtype: str, *, pipeline: bool) -> ForwardModel:
    """The model on ``layout``, computed in ``dtype``; in a pipeline its stages get equal shares of the layers.

    Raises ConfigError where the tensor group cannot share the model, CheckpointError where weights are not whole.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    if pipeline:
        layers = balanced([1] * config.num_layers, layout.pipe_group.size())
        parts = gpt2_layers(config, layout), gpt2_loss(config, layout)
        module = PipelinedModel(*parts, ActivationConfig(), layout, bounds=bounds(layers, config))
    else:
        module = GPT2Model(config, ActivationConfig(), layout)
    return ForwardModel(fill(module, source, config, layout), config, layout)
