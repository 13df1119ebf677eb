"""A model that only runs forward: whole on each rank, cut across a tensor group, and in pipeline stages.

DeepSpeed's pipeline engine is for training: it wants an optimizer, and returns the loss alone. Forward only, a
pipeline is its container, and hidden states sent from stage to stage.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import ActivationConfig, ModelConfig
from megatron.inference.loading import DTYPES, config_on, fill, load_model
from megatron.inference.source import Source
from megatron.model.embedding import document_numbers
from megatron.model.gpt2_model import GPT2ModelPipe
from megatron.model.transformer import Stream
from megatron.mpu.layout import ParallelLayout
from megatron.partition import balanced, bounds

Forward = Callable[[Tensor], Tensor | None]
"""tokens [b, s], alike on all ranks that share a batch, -> logits [b, s, v/t] on those of the last stage, else None."""


def open_forward(source: Source, layout: ParallelLayout, dtype: str, *, pipeline: bool) -> Forward:
    """This rank's part of the model, on its device, as one of the last stage or of an earlier one.

    Raises ConfigError where the tensor group cannot share the model, CheckpointError where weights are not whole.
    """
    if not pipeline:
        return load_model(source, layout, dtype)
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    parts = bounds(layers_of_stages(config, layout.pipe_group.size()))
    stage = fill(GPT2ModelPipe(config, ActivationConfig(), layout, bounds=parts), source, config, layout)
    return partial(_run_stage, stage, config, layout)


def layers_of_stages(config: ModelConfig, stages: int) -> list[int]:
    """Transformer layers of each stage, as equal as can be."""
    return balanced([1] * config.num_layers, stages)


def _run_stage(stage: GPT2ModelPipe, config: ModelConfig, layout: ParallelLayout, tokens: Tensor) -> Tensor | None:
    """This stage's part of a batch: tokens on the first, hidden states from the stage before on the others."""
    group, place = layout.pipe_group, layout.pipe_group.rank()
    stream: Stream = tokens
    if not layout.is_first_stage:
        hidden = _space(config, tokens)
        dist.recv(hidden, dist.get_global_rank(group, place - 1), group)
        # Every stage has the tokens, so that what they say of documents need not travel.
        stream = (hidden, document_numbers(tokens, config.eod_token)) if config.reset_attention_mask else hidden
    output = stage(stream)
    if layout.is_last_stage:
        return output
    hidden = output[0] if isinstance(output, tuple) else output
    dist.send(hidden.contiguous(), dist.get_global_rank(group, place + 1), group)
    return None


def _space(config: ModelConfig, tokens: Tensor) -> Tensor:
    """Room for hidden states of ``tokens``: [b, s, h], or [s, b, h] as ``sequence_dim`` says."""
    shape = [*tokens.shape] if config.sequence_dim else [*reversed(tokens.shape)]
    dtype = torch.float32 if config.fp32_residual_connection else DTYPES[config.dtype]
    return torch.empty(*shape, config.hidden_size, dtype=dtype, device=tokens.device)
