"""Models loaded for inference, on one process or sharded over a tensor-parallel group.

source = open_source(path)                             # config and tokenizer, without torch: see source.py
with opened_model(source, ranks, "bf16") as model:     # this rank's shard, in eval mode, on its device

b batch, q new tokens, h hidden, v vocabulary, t tensor-parallel size
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.checkpoint.checks import check_numbers
from megatron.checkpoint.tensor_files import files_of
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.containers import SequentialModel, run_in_order, sequential_model
from megatron.launch.distributed import distributed
from megatron.model.architectures import architecture_of
from megatron.model.embedding import without_segment_ids
from megatron.model.spec import ParameterSpec
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.mappings import gather_from_model_parallel_region
from megatron.tools.convert.load_and_save import read_model
from megatron.tools.inference.cache import CachedDecoding, KeyValueCache, cached_decoding
from megatron.tools.inference.source import Source, config_on

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LanguageModel:
    """A model in eval mode, with its configuration and tensor group."""

    module: SequentialModel
    config: ModelConfig
    tensor_group: ProcessGroup

    @property
    def continues(self) -> bool:
        """Whether completions continue the prompt; with an encoder (T5) they are separate texts."""
        return not self.config.encoder_num_layers

    def next_logits(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        counts: Sequence[int] | None = None,
        images: Tensor | None = None,
    ) -> Tensor:
        """Logits [b, v/t] of the next tokens after ``tokens`` [b, q], which follow the tokens in ``cache``.

        Each sequence has ``counts`` tokens, by default all q, and padding after them. ``images`` [i, p, h] are the
        projected features, a row for each placeholder.
        """
        words, positions, *layers, last_norm, head = self.language_layers
        b, q = tokens.shape
        counts = counts or [q] * b
        inputs = tokens if images is None else (images, tokens)
        if cache is None:
            hidden = run_in_order([words, positions, *layers], inputs)
        else:
            cache.advance(counts)
            embedded = positions(without_segment_ids(words(inputs)), cache.positions)
            with self.decoding.using(cache):
                hidden = run_in_order(layers, embedded)
        rows, ends = torch.arange(b, device=hidden.device), torch.tensor(counts, device=hidden.device) - 1
        last = last_norm(hidden.movedim(self.config.sequence_dim, 1)[rows, ends])  # [b, h]
        return head(last.unsqueeze(self.config.sequence_dim)).squeeze(1)

    def projected(self, images: np.ndarray) -> Tensor:
        """Encode and project images, uint8 [n, height, width, 3], to features for the language model, [n p, h]."""
        pixels = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.device)  # passed on, but not read
        projected, _ = run_in_order(self._layers[: -len(self.language_layers)], (pixels, tokens))
        return projected.flatten(0, 1)

    @cached_property
    def _layers(self) -> list[Any]:
        return list(self.module.forward_funcs)  # with different signatures

    @cached_property
    def language_layers(self) -> list[Any]:
        """All layers except the vision encoder and the projector."""
        return self._layers[
            sum(layer.part != "language" for layer in architecture_of(self.config).layers(self.config)) :
        ]

    @cached_property
    def decoding(self) -> CachedDecoding:
        """The current cache of the attention modules, which the first access wraps."""
        return cached_decoding(self._layers if self.config.encoder_num_layers else self.language_layers)

    def empty_cache(self, rows: int) -> KeyValueCache:
        """A new cache for ``rows`` sequences."""
        heads = max(self.config.query_groups // self.tensor_group.size(), 1)
        dtype = next(self.module.parameters()).dtype
        config = self.config.language_model if self.config.vision_num_layers else self.config
        return KeyValueCache(config, rows, heads=heads, dtype=dtype, device=self.device)

    def gathered(self, logits: Tensor) -> Tensor:
        """Gather logits [b, v/t] over the tensor-parallel ranks, without padding, in fp32 on the CPU [b, v]."""
        logits = gather_from_model_parallel_region(logits, self.tensor_group)
        return logits[:, : self.config.vocab_size].float().cpu()

    @cached_property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.module.parameters()).device


@contextmanager
def opened_model(source: Source, ranks: int, dtype: str) -> Iterator[LanguageModel]:
    """The model on ``ranks`` tensor-parallel ranks, see ``opened``. Raises as ``load_model``."""

    def load(layout: ParallelLayout) -> LanguageModel:
        return LanguageModel(load_model(source, layout, dtype), source.config, layout.tensor_group)

    with opened(ParallelConfig(model_parallel_size=ranks, world_size=ranks), load) as model:
        yield model


@contextmanager
def opened(parallel: ParallelConfig, load: Callable[[ParallelLayout], T]) -> Iterator[T]:
    """The result of ``load`` on this rank, within a process group that is destroyed at the end of the block.

    Needs an environment from ``prepare_environment``.
    """
    silence_known_warnings()
    with distributed(parallel) as layout:
        with deepspeed_silenced(verbose=False):
            model = load(layout)
        yield model


def load_model(source: Source, layout: ParallelLayout, dtype: str = "fp32") -> SequentialModel:
    """This rank's shard of the model, in eval mode, with a type of ``DTYPES``, on the rank's device.

    Logits are [b, s, v/t]; columns from ``source.config.vocab_size`` on are padding.
    Raises ConfigError if the tensor group cannot share the model, CheckpointError if weights are incomplete.
    """
    config = config_on(source.config, layout.tensor_group.size(), dtype)
    return load_weights(sequential_model(config, ActivationConfig(), layout), source, config, layout)


def load_weights(model: Module, source: Source, config: ModelConfig, layout: ParallelLayout) -> Module:
    """Load this rank's shard of the weights of ``model``, which has some or all layers of ``config``.

    Raises CheckpointError if weights are incomplete.
    """
    weights, specs = read_model(source.found).weights, architecture_of(config).named_parameters(config)
    dtype = DTYPES[config.dtype]
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(_local_shard(weights[name], specs[name], config, layout))
        if dtype is not parameter.dtype:
            check_numbers(files_of(weights).get(name, source.found.path), name, parameter, dtype)
    return model.to(get_accelerator().current_device_name(), dtype).eval()


def _local_shard(weight: Tensor, spec: ParameterSpec, config: ModelConfig, layout: ParallelLayout) -> Tensor:
    if spec.is_vocabulary:
        weight = F.pad(weight[: config.vocab_size], (0, 0, 0, config.padded_vocab_size - config.vocab_size))
    dim = spec.shard_dim
    return weight if dim is None else weight.chunk(layout.tensor_group.size(), dim)[layout.tensor_group.rank()]
