"""Converts Hugging Face's weights to ours, one at a time, and loads ``--load-hf``; tools convert them back.

n heads, g query groups, d size of a head, h hidden, f hidden size of the MLP
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.checkpoint.checks import check_numbers
from megatron.checkpoint.load import Loaded
from megatron.checkpoint.resharding import load_states
from megatron.checkpoint.stored import WEIGHT, State
from megatron.checkpoint.tensor_files import LazyTensors, SafetensorsFiles, files_of, no_floats, outlines_of
from megatron.common.errors import CheckpointError
from megatron.config import ModelConfig, RunConfig
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import GPT2_FORMAT, format_of, read_config, shape_problems, source_shapes
from megatron.model.huggingface.formats import PREFIX, present
from megatron.model.spec import sizes_of
from megatron.parallel.expert import local_experts
from megatron.parallel.layout import ParallelLayout

_SHOWN = 4


def our_weights(tensors: Mapping[str, Tensor], config: ModelConfig, source: str) -> LazyTensors:
    """The weights of the model ``config``, with all rows of the vocabulary, from Hugging Face's ``tensors``.

    Raises CheckpointError with a line for each of the first weights that are missing, unknown or have another shape,
    and if tied weights, such as head and embedding, are not equal.
    """
    outlines = outlines_of(tensors)
    shapes = {name: tuple(outline.shape) for name, outline in outlines.items()}
    if problems := shape_problems(config, shapes, source, files_of(tensors)):
        more = [f"{source}: {len(problems)} such lines in all"] if len(problems) > _SHOWN else []
        raise CheckpointError(problems[:_SHOWN] + more)
    wanted = (present(name, tensors) for theirs in source_shapes(config).values() for name in theirs)
    if problems := no_floats(tensors, wanted, source):
        raise CheckpointError(problems[:_SHOWN])
    sources = {ours: [present(name, tensors) for name in theirs] for ours, theirs in source_shapes(config).items()}
    needed = {name for names in sources.values() for name in names}
    for name, other in format_of(config).tied.items():
        other = present(other, tensors)
        if name in tensors and name not in needed and not tensors[name].equal(tensors[other]):
            table = other.removeprefix(PREFIX)
            raise CheckpointError(
                f"{source}: {name} is another table than {table}, and config.json says that both are one"
            )
    specs = architecture_of(config).named_parameters(config)

    def read(name: str) -> Tensor:
        return joined(name, [_finite(tensors, theirs, tensors[theirs], source) for theirs in sources[name]], config)

    def dtype(name: str) -> torch.dtype:
        return reduce(torch.promote_types, (outlines[theirs].dtype for theirs in sources[name]))

    return LazyTensors({name: torch.empty(specs[name].shape, dtype=dtype(name), device="meta") for name in specs}, read)


def _finite(tensors: Mapping[str, Tensor], name: str, value: Tensor, source: str = "") -> Tensor:
    """``value``, ``tensors[name]`` or a part of it. Raises CheckpointError with its file if it is not finite."""
    check_numbers(files_of(tensors).get(name, source), name, value)
    return value


def joined(name: str, theirs: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Our weight ``name``, or a rank's shard with complete query groups, from Hugging Face's tensors."""
    config = sizes_of(config, name)
    if format_of(config) is GPT2_FORMAT:
        return _from_gpt2(name, theirs[0], config)
    if "key_value" in name:  # [n d, ..], [g d, ..], [g d, ..] -> [g, n/g + 2, d, ..]; or without the first
        count = theirs[1].size(0) // config.head_size
        groups = [tensor.unflatten(0, (count, -1, config.head_size)) for tensor in theirs]
        return torch.cat(groups, dim=1).flatten(0, 2)
    if "mlp.experts" in name:  # tensors of all experts in order; for each one gate and up if it is gated
        stacked = torch.stack(list(theirs))
        return stacked.unflatten(0, (-1, 2)) if "dense_h_to_4h" in name else stacked
    return torch.stack(list(theirs)) if len(theirs) > 1 else theirs[0]


def _from_gpt2(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    tensor = tensor.t() if tensor.dim() == 2 and "embeddings" not in name else tensor
    if "query_key_value" in name:  # [3, n, d, ..] -> [n, 3, d, ..]
        tensor = tensor.unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.contiguous()


def load_huggingface(engine: DeepSpeedEngine, run: RunConfig, layout: ParallelLayout) -> Loaded:
    """Load the weights of ``--load-hf`` into ``engine``, on any layout; the optimizer state is new.

    Each rank reads its shards of the weights of its stage. Every rank must call it. Raises CheckpointError if the files
    do not match the model, although the checks before training have passed.
    """
    folder = Path(str(run.checkpoint.load_hf))
    config, tensors = read_config(folder), SafetensorsFiles(folder)
    shards = _Shards(tensors, our_weights(tensors, config, str(folder)), config, layout, run.model.vocab_size)

    def read(name: str, parameter: nn.Parameter) -> State:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        shard = shards.read(name, shape[0])
        padding = (0, 0) * (shard.dim() - 1) + (0, shape[0] - shard.size(0))
        return {WEIGHT: F.pad(shard, padding)}

    # LoRA adapters, which the folder does not have, keep their values.
    load_states(engine, read, folder, architecture_of(config).named_parameters(config))
    remarks = [f"weights of {folder}, with a new optimizer"]
    if (rows := config.vocab_size - run.model.vocab_size) > 0:
        remarks.append(f"the last {rows:,} rows of its vocabulary are left out: the tokenizer has no tokens for them")
    return Loaded(0, tuple(remarks))


@dataclass(frozen=True)
class _Shards:
    """One tensor-parallel rank's shards of the weights in a folder."""

    tensors: SafetensorsFiles
    weights: LazyTensors
    """The full weights under our names."""
    config: ModelConfig
    layout: ParallelLayout
    tokens: int
    """Number of rows of the vocabulary that are not padding."""

    def read(self, name: str, rows: int) -> Tensor:
        """This rank's shard of a weight, with ``rows`` rows, or fewer of the vocabulary, without padding."""
        config, rank, size = self.config, self.layout.tensor_group.rank(), self.layout.tensor_group.size()
        spec, sources = architecture_of(config).named_parameters(config)[name], source_shapes(config)[name]
        dim = spec.shard_dim
        if dim is None:
            return self.weights[name]
        if spec.is_vocabulary:
            ends = min(self.tokens, rank * rows), min(self.tokens, (rank + 1) * rows)
            return self._part(present(next(iter(sources)), self.tensors), 0, *ends)
        groups = sizes_of(config, name).query_groups
        if format_of(config) is GPT2_FORMAT or ("query_key_value" in name and groups % size):
            return self.weights[name].chunk(size, dim)[rank]
        dim -= len(spec.shape) - len(next(iter(sources.values())))  # gate and up are stacked, and so are experts
        if spec.is_expert:
            own, count = local_experts(config.num_experts, self.layout), len(sources) // config.num_experts
            sources = dict(list(sources.items())[own.start * count : own.stop * count])
        lengths = {present(theirs, self.tensors): shape[dim] // size for theirs, shape in sources.items()}
        parts = [self._part(key, dim, rank * length, (rank + 1) * length) for key, length in lengths.items()]
        return joined(name, parts, config)

    def _part(self, name: str, dim: int, begin: int, end: int) -> Tensor:
        return _finite(self.tensors, name, self.tensors[name].narrow(dim, begin, end - begin))
