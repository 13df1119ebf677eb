"""Descriptions of architectures as lists of layers, without torch: the single source for the entire suite.

An ``ArchitectureSpec`` lists the layers of a model with their parameters, cost and activations. Pipeline partitioning,
weight decay, planner, FLOPs metrics, resharding and conversion are all derived from it. The torch module of each layer
is given by its import path, and imported only when a model is built.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pkgutil import resolve_name
from typing import Any

from megatron.common.errors import ConfigError
from megatron.config import ModelConfig, RunConfig
from megatron.ops.choices import runs_in_fp8


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a layer, with its unsharded shape."""

    name: str
    """Name within its layer, such as ``attention.dense.weight``; ``named_parameters`` adds the layer's prefix."""
    shape: tuple[int, ...]
    shard_dim: int | None = None
    """Dimension that tensor parallelism shards; None if the parameter is replicated."""
    weight_decay: bool = True
    is_vocabulary: bool = False
    """Whether the first dimension is the vocabulary, padded to ``padded_vocab_size``."""
    is_expert: bool = False
    """Whether the first dimension is the experts of a layer, which expert parallelism shards."""

    @cached_property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    def local_numel(self, tensor_parallel_size: int, expert_parallel_size: int = 1) -> int:
        """Elements on one rank."""
        numel = self.numel if self.shard_dim is None else self.numel // tensor_parallel_size
        return numel // expert_parallel_size if self.is_expert else numel


@dataclass(frozen=True)
class KeptActivations:
    """Activations that a layer keeps for its backward pass, in elements per token, by dtype and sharding.

    Attention scores are counted separately, since they grow with the square of the sequence. All but ``sharded`` are
    sharded over the tensor-parallel ranks only with sequence parallelism.
    """

    residual: int = 0
    """Elements in the dtype of the residual stream."""
    local: int = 0
    """Elements in the dtype of the model, such as the input of a column-parallel layer."""
    masks: int = 0
    """Elements of dropout masks of hidden states."""
    statistics: int = 0
    """fp32 numbers such as the mean of a norm."""
    sharded: int = 0
    """Elements in the dtype of the model that are always sharded over the tensor-parallel ranks."""
    index_bytes: int = 0
    """Bytes, not elements, of indices and their masks."""


def times(kept: KeptActivations, tokens: Fraction) -> KeptActivations:
    """``kept`` scaled by ``tokens``: tokens of the layer for each token that costs are counted for."""
    return KeptActivations(**{name: round(value * tokens) for name, value in vars(kept).items()})


@dataclass(frozen=True)
class LayerSpec:
    """One layer of an architecture: its module, parameters, FLOPs and kept activations."""

    module: str = ""
    """``path:name`` of the module's class, or of a function that returns the module; called with (config, layout,
    **arguments), and ``layer_number`` (from 1) for a block. Empty for a layer that is only a function."""
    forward: str = ""
    """``path:name`` of a function to call instead of the module's forward: (module, hidden states), or (hidden states)
    without a module."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Replaces the name of the class or function in ``class_name``."""
    parameters: tuple[ParameterSpec, ...] = ()
    matmul_flops: int = 0
    """Forward FLOPs per token in matmuls with weights: 2 for each weight."""
    frozen_flops: int = 0
    """FLOPs saved in the backward pass, which otherwise takes twice the forward FLOPs: ``matmul_flops`` with frozen
    weights, whose gradient is not computed, or everything for a layer that has no backward pass."""
    repeated_flops: int = 0
    """Part of ``matmul_flops`` that ``--tiled-mlp`` recomputes in the backward pass."""
    attention_size: int = 0
    """Columns of all heads; the attention core takes 4 FLOPs per token, column and attended token."""
    cross_attention_size: int = 0
    """Part of ``attention_size`` in cross-attention, which has no relative position bias."""
    kept: KeptActivations = KeptActivations()
    tied: str | None = None
    """Key shared by layers with the same parameters; None if they are not tied."""
    part: str = "language"
    """Part of a vision-language model that the layer belongs to, see ``megatron.config.vision.PARTS``; "" for weights
    that are never trained."""
    is_block: bool = False
    """Whether it is one of the ``num_layers`` transformer layers, the units of partitioning and recomputation."""

    @property
    def class_name(self) -> str:
        """The name that ``--pipeline-partition type:REGEX`` matches."""
        return self.name or (self.module or self.forward).rpartition(":")[2]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without tensor parallelism."""
        return sum(parameter.numel for parameter in self.parameters)

    def attention_flops(self, seq_length: int) -> int:
        """Forward FLOPs of the attention core per token; a causal mask does not reduce them."""
        return 4 * seq_length * self.attention_size

    def flops(self, seq_length: int) -> int:
        """FLOPs of the forward pass per token."""
        return self.matmul_flops + self.attention_flops(seq_length)


@dataclass(frozen=True)
class ArchitectureSpec:
    """A model architecture: its name, entry script, layers and loss."""

    name: str
    program: str
    """The entry script that trains the model."""
    tokenizers: tuple[str, ...]
    """Tokenizer types that have the special tokens of the model; the first one is the default."""
    layers: Callable[[ModelConfig], Sequence[LayerSpec]]
    """Returns all layers of a model in order: embeddings, transformer layers, final norm and head."""
    loss: str
    """``path:name`` of a function of (config, layout) that returns loss(output of the last layer, targets)."""
    masked_lm: bool | None = False
    """Whether samples are sentence pairs with masked tokens (BERT) instead of token sequences. None for a classifier,
    whose samples are rows of a table with a class."""
    is_encoder_decoder: bool = False
    """Whether samples are texts with masked spans for an encoder, and the spans for a decoder (T5)."""
    reads_images: bool = False
    """Whether samples are conversations with images (LLaVA)."""
    defaults: tuple[str, ...] = ()
    """Command-line arguments that are the defaults of its program."""
    provider: Any = None
    """The ``megatron.training.model_provider.ModelProvider`` of a user's own model (``pretrain``), whose ``layers``
    have no parameters and costs."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of models (``Flag.models``) whose flags the program accepts."""
        if not self.is_language_model:
            return ("other",)
        causal = ("gpt", "llava") if self.reads_images else ("gpt",)
        return ("t5",) if self.is_encoder_decoder else ("bert",) if self.masked_lm else causal

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to earlier tokens only."""
        return self.masked_lm is False

    @property
    def is_language_model(self) -> bool:
        """Whether the model is pretrained on indexed data sets, not a classifier."""
        return self.masked_lm is not None

    def build_loss(self, config: ModelConfig, layout: Any) -> Callable[..., Any]:
        """Build the loss function of (output of the last layer, targets). Imports torch."""
        return resolve_name(self.loss)(config, layout)

    def prefixed_layers(self, config: ModelConfig) -> Iterator[tuple[str, LayerSpec]]:
        """Each layer with the prefix of its parameter names (its index or tied key); tied layers once."""
        tied: set[str] = set()
        for index, layer in enumerate(self.layers(config)):
            if layer.tied not in tied:
                yield parameter_prefix(index, layer), layer
            if layer.tied:
                tied.add(layer.tied)

    def named_parameters(self, config: ModelConfig) -> dict[str, ParameterSpec]:
        """All parameters by their name in modules and checkpoints; tied layers first, in the order of torch modules."""
        layers = sorted(self.prefixed_layers(config), key=lambda prefixed: prefixed[1].tied is None)
        return {prefix + parameter.name: parameter for prefix, layer in layers for parameter in layer.parameters}


def part_of(config: ModelConfig, name: str) -> str:
    """The part of a vision-language model that the parameter ``name`` belongs to; ``language`` for other models."""
    if not config.vision_num_layers:
        return "language"
    return _parts(config)[name[: name.index(".", len(_TIED) if name.startswith(_TIED) else 0) + 1]]


@lru_cache(maxsize=8)
def _parts(config: ModelConfig) -> dict[str, str]:
    """Parameter name prefix of each layer to its part."""
    return {prefix: layer.part for prefix, layer in architecture_of(config).prefixed_layers(config)}


def sizes_of(config: ModelConfig, name: str) -> ModelConfig:
    """The config of the model part with the parameter ``name``: of the vision encoder, or of the language model."""
    return config.vision_model if part_of(config, name) == "vision" else config


def is_trained(config: ModelConfig, name: str) -> bool:
    """Whether the parameter ``name`` is trained; with ``--lora-rank`` only adapters of the language model are."""
    return is_trained_in(config, part_of(config, name), name)


def is_trained_in(config: ModelConfig, part: str, name: str) -> bool:
    """Whether the parameter ``name`` (in the model or the layer) of a layer of ``part`` is trained."""
    if not part or part in config.frozen_parts:
        return False
    return part != "language" or not config.lora_rank or ".lora." in name


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """The number of parameters of the model, and of trained parameters."""
    sizes = {name: spec.numel for name, spec in architecture_of(config).named_parameters(config).items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if is_trained(config, name))


def active_parameters(config: ModelConfig) -> int:
    """Number of parameters used per token: with experts, only those of the experts that the router chooses."""
    specs = architecture_of(config).named_parameters(config).values()
    chosen = config.moe_router_topk
    return sum(spec.numel // spec.shape[0] * chosen if spec.is_expert else spec.numel for spec in specs)


_TIED = "tied_modules."


def parameter_prefix(index: int, layer: LayerSpec) -> str:
    """Prefix of a layer's parameter names in modules and checkpoints: its index or tied key."""
    return f"{index}." if layer.tied is None else f"{_TIED}{layer.tied}."


def fp8_weights(config: ModelConfig, layer: LayerSpec, tensor_parallel_size: int) -> tuple[ParameterSpec, ...]:
    """The weights of ``layer`` whose matmuls run in FP8; adapters and experts never do."""
    return tuple(weight for weight in linear_weights(layer) if _is_in_fp8(config, weight, tensor_parallel_size))


def linear_weights(layer: LayerSpec) -> tuple[ParameterSpec, ...]:
    """The tensor-parallel weight matrices of a transformer layer, without adapters and experts."""
    if not layer.is_block:
        return ()
    return tuple(
        parameter
        for parameter in layer.parameters
        if parameter.shard_dim is not None
        and len(parameter.shape) > 1
        and not (parameter.is_expert or ".lora." in parameter.name)
        and parameter.name.endswith(".weight")
    )


def _is_in_fp8(config: ModelConfig, weight: ParameterSpec, t: int) -> bool:
    inputs = weight.shape[-1]
    divides_inputs = weight.shard_dim == len(weight.shape) - 1
    return runs_in_fp8(config, inputs, weight.numel // inputs, (t, 1) if divides_inputs else (1, t))


ARCHITECTURES: dict[str, ArchitectureSpec] = {}
"""Every registered architecture by name."""


def register(spec: ArchitectureSpec) -> ArchitectureSpec:
    """Register an architecture under its name, which configs and checkpoints refer to."""
    ARCHITECTURES[spec.name] = spec
    return spec


def architecture_of(config: ModelConfig) -> ArchitectureSpec:
    """The registered architecture of ``config``. Raises ConfigError if its entry script was not imported."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"the model {config.architecture} is unknown (known: {known}): name the entry script that has its list of "
            "layers with --program"
        )
    return ARCHITECTURES[config.architecture]


def model_flops(run: RunConfig) -> float:
    """FLOPs of one iteration, forward and backward, without recomputation (arXiv 2205.05198, appendix A)."""
    layers = architecture_of(run.model).layers(run.model)
    return 3 * _forward_flops(run, layers) - _tokens(run) * sum(layer.frozen_flops for layer in layers)


def hardware_flops(run: RunConfig) -> float:
    """FLOPs of one iteration including recomputed forward passes (arXiv 2104.04473, section 5.1)."""
    blocks = [layer for layer in architecture_of(run.model).layers(run.model) if layer.is_block]
    flops = model_flops(run) + _tokens(run) * sum(layer.repeated_flops for layer in blocks)
    if run.activation.layers_together:
        return flops + _forward_flops(run, blocks)
    if run.model.recomputes_attention:
        return flops + _forward_flops(run, [replace(layer, matmul_flops=0) for layer in blocks])
    return flops


def _forward_flops(run: RunConfig, layers: Sequence[LayerSpec]) -> float:
    return _tokens(run) * sum(layer.flops(run.data.seq_length) for layer in layers)


def _tokens(run: RunConfig) -> int:
    return run.train.global_batch_size * run.data.seq_length
