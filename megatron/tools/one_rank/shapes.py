"""What crosses the boundary between two pipeline stages, which a stage learns from the one before."""

from typing import Any

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.engines.transfers import as_list
from megatron.model.architectures import architecture_of
from megatron.model.architectures.layers import EMBED
from megatron.model.partition import layers_per_chunk, partition_boundaries
from megatron.parallel.pipeline.simulation import Transfer


def value_at(run: RunConfig, one: Transfer) -> Any:
    """A tensor, or the tuple of tensors, that ``one`` carries, on the meta device."""
    states = _states(run, one.boundary)
    if one.is_forward or isinstance(states, Tensor):
        return states
    return tuple(state for state in as_list(states) if state.is_floating_point())


def _states(run: RunConfig, chunk: int) -> Any:
    """What leaves model chunk ``chunk``: see ``megatron.model.transformer`` and ``megatron.model.t5``."""
    b, s, h = run.train.micro_batch_size, run.data.seq_length // run.parallel.sequence_ranks, run.model.hidden_size
    if architecture_of(run.model).is_encoder_decoder:
        hidden, r = _hidden(run, b, s, h), run.data.decoder_seq_length or 0
        if not _is_after_encoder(run, chunk):
            return hidden, _whole_numbers(b, s), _whole_numbers(b, r)
        return _hidden(run, b, r, h), hidden, _whole_numbers(b, s)
    if run.model.vision_num_layers and not _is_after(run, chunk, "ImageEmbedding"):
        images = _hidden(run, run.model.image_slots, run.model.encoder_tokens, run.model.vision_hidden_size)
        return images, _whole_numbers(b, 2, run.data.seq_length)
    shards = run.parallel.model_parallel_size if run.parallel.sequence_parallel else 1
    sizes = (b, s // shards) if run.model.sequence_dim == 1 else (s // shards, b)
    hidden = _hidden(run, *sizes, h)
    has_ids = run.model.layers_need_segment_ids or architecture_of(run.model).masked_lm
    return (hidden, _whole_numbers(b, s)) if has_ids else hidden


def _hidden(run: RunConfig, *sizes: int) -> Tensor:
    is_whole = run.precision.dtype == "fp32" or run.model.fp32_residual_connection
    dtype = torch.float32 if is_whole else torch.bfloat16 if run.precision.dtype == "bf16" else torch.float16
    return torch.empty(sizes, dtype=dtype, device="meta")


def _whole_numbers(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int32, device="meta")


def _is_after(run: RunConfig, chunk: int, name: str) -> bool:
    """Whether the chunk, or one before it, has a layer of this class."""
    end = partition_boundaries(layers_per_chunk(run), run.model)[chunk + 1]
    return any(layer.class_name == name for layer in architecture_of(run.model).layers(run.model)[:end])


def _is_after_encoder(run: RunConfig, chunk: int) -> bool:
    """Whether the chunk ends after the embedding of the decoder, the second use of the table."""
    end = partition_boundaries(layers_per_chunk(run), run.model)[chunk + 1]
    layers = architecture_of(run.model).layers(run.model)[:end]
    return sum(layer.tied == EMBED or layer.module.endswith("Embedding") for layer in layers) > 1
