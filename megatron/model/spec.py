"""What an architecture consists of, without torch: the one description that every part of the suite reads.

An ``ArchitectureSpec`` lists the layers of a model with their parameters, cost and activations. The partition into
pipeline stages, weight decay, the planner, the FLOPs in the metrics, resharding and conversion all follow from it. The
torch module of each layer is named by its import path, and imported only when a model is built.
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
    """One parameter of a layer, as a single process has it, without tensor parallelism."""

    name: str
    """Within its layer, such as ``attention.dense.weight``; with the layer's prefix in ``named_parameters``."""
    shape: tuple[int, ...]
    shard_dim: int | None = None
    """Dimension that tensor parallelism divides; None if it is replicated."""
    weight_decay: bool = True
    is_vocabulary: bool = False
    """Whether the first dimension is the vocabulary, padded to ``padded_vocab_size``."""
    is_expert: bool = False
    """Whether the first dimension counts the experts of a layer, which expert parallelism divides."""

    @cached_property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    def local_numel(self, tensor_parallel_size: int, expert_parallel_size: int = 1) -> int:
        """Elements on one rank."""
        numel = self.numel if self.shard_dim is None else self.numel // tensor_parallel_size
        return numel // expert_parallel_size if self.is_expert else numel


@dataclass(frozen=True)
class KeptActivations:
    """What a layer keeps for its backward pass: elements per token, by type and by how ranks share them.

    Attention scores are counted separately, since they grow with the square of the sequence.
    """

    residual: int = 0
    """In the residual stream's type; sequence parallelism divides them over the tensor-parallel ranks."""
    local: int = 0
    """In the model's type, divided in the same way, such as the input of a column-parallel layer."""
    masks: int = 0
    """Dropout masks of hidden states, divided in the same way."""
    statistics: int = 0
    """fp32 numbers such as a norm's mean, divided in the same way."""
    sharded: int = 0
    """In the model's type, always divided over the tensor-parallel ranks."""
    index_bytes: int = 0
    """Bytes, not elements, of indices and their masks."""


def times(kept: KeptActivations, tokens: Fraction) -> KeptActivations:
    """What a layer keeps of that many tokens for each one that costs are counted for."""
    return KeptActivations(**{name: round(value * tokens) for name, value in vars(kept).items()})


@dataclass(frozen=True)
class LayerSpec:
    """One entry of the list of layers."""

    module: str = ""
    """``path:name`` of its module's class, or of a function that returns the module, called with (config, layout,
    **arguments), and for a block with its ``layer_number``, from 1 on. Empty for a layer that is a function."""
    forward: str = ""
    """``path:name`` of what runs in place of the module's forward, of (module, hidden states); without a module of the
    hidden states."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """In place of the name of the class or function."""
    parameters: tuple[ParameterSpec, ...] = ()
    matmul_flops: int = 0
    """FLOPs of the forward pass per token in matmuls with weights; 2 for each weight."""
    frozen_flops: int = 0
    """FLOPs that the backward pass, otherwise twice the forward pass, is spared: ``matmul_flops`` with frozen weights,
    of which it computes only the input's gradient, or all of a layer that it does not reach."""
    repeated_flops: int = 0
    """Part of ``matmul_flops`` that the backward pass always recomputes, with ``--tiled-mlp``."""
    attention_size: int = 0
    """Columns of all heads together: the attention core takes 4 FLOPs per token, column and attended token."""
    cross_attention_size: int = 0
    """Part of ``attention_size`` in attention to another sequence, which has no bias of relative positions."""
    kept: KeptActivations = KeptActivations()
    tied: str | None = None
    """Key that layers with the same parameters share; None for a layer with its own."""
    part: str = "language"
    """The part of a vision-language model that it belongs to, of ``megatron.config.vision.PARTS``; "" for weights that
    are never trained."""
    is_block: bool = False
    """Whether it is one of the ``num_layers`` transformer layers, which the pipeline divides and recomputation runs
    again."""

    @property
    def class_name(self) -> str:
        """What ``--pipeline-partition type:REGEX`` is matched with."""
        return self.name or (self.module or self.forward).rpartition(":")[2]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, without tensor parallelism."""
        return sum(parameter.numel for parameter in self.parameters)

    def attention_flops(self, seq_length: int) -> int:
        """FLOPs of the attention core in the forward pass, per token; a causal mask does not reduce them."""
        return 4 * seq_length * self.attention_size

    def flops(self, seq_length: int) -> int:
        """FLOPs of the forward pass per token."""
        return self.matmul_flops + self.attention_flops(seq_length)


@dataclass(frozen=True)
class ArchitectureSpec:
    """A model: what it is called, what trains it, and its layers."""

    name: str
    program: str
    """The entry script that trains it."""
    tokenizers: tuple[str, ...]
    """The kinds of tokenizer whose vocabulary has the special tokens of the model; the first one is the default."""
    layers: Callable[[ModelConfig], Sequence[LayerSpec]]
    """The layers of a model of these sizes, in order: before the blocks, the blocks, after them."""
    loss: str
    """``path:name`` of a function of (config, layout) that returns loss(output of the last layer, targets)."""
    masked_lm: bool | None = False
    """Whether samples are pairs of sentences with masked tokens (BERT), instead of runs of tokens. None for a model
    that is no language model: its samples are rows of a table, each with a class."""
    is_encoder_decoder: bool = False
    """Whether samples are texts with masked spans, for an encoder, and the spans, for a decoder (T5)."""
    reads_images: bool = False
    """Whether samples are conversations with images (LLaVA)."""
    defaults: tuple[str, ...] = ()
    """Command-line arguments that its program adds."""
    provider: Any = None
    """For a model without a spec: its ``megatron.training.model_provider.ModelProvider``; ``layers`` then says nothing
    about parameters and cost."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of models whose flags its program has."""
        if not self.is_language_model:
            return ("other",)
        causal = ("gpt", "llava") if self.reads_images else ("gpt",)
        return ("t5",) if self.is_encoder_decoder else ("bert",) if self.masked_lm else causal

    @property
    def is_causal(self) -> bool:
        """Whether its tokens attend to earlier ones only."""
        return self.masked_lm is False

    @property
    def is_language_model(self) -> bool:
        """Whether it is pretrained, on indexed data sets."""
        return self.masked_lm is not None

    def build_loss(self, config: ModelConfig, layout: Any) -> Callable[..., Any]:
        """The loss function of the last layer's output and the targets. Imports torch."""
        return resolve_name(self.loss)(config, layout)

    def prefixed_layers(self, config: ModelConfig) -> Iterator[tuple[str, LayerSpec]]:
        """Each layer with the prefix of its parameters' names: its index, or its tied key; tied layers once."""
        tied: set[str] = set()
        for index, layer in enumerate(self.layers(config)):
            if layer.tied not in tied:
                yield parameter_prefix(index, layer), layer
            if layer.tied:
                tied.add(layer.tied)

    def named_parameters(self, config: ModelConfig) -> dict[str, ParameterSpec]:
        """Every parameter by its name in modules and checkpoints; tied layers first, as modules list them."""
        layers = sorted(self.prefixed_layers(config), key=lambda prefixed: prefixed[1].tied is None)
        return {prefix + parameter.name: parameter for prefix, layer in layers for parameter in layer.parameters}


def part_of(config: ModelConfig, name: str) -> str:
    """The part of a vision-language model that the parameter ``name`` belongs to; of others the language model."""
    if not config.vision_num_layers:
        return "language"
    return _parts(config)[name[: name.index(".", len(_TIED) if name.startswith(_TIED) else 0) + 1]]


@lru_cache(maxsize=8)
def _parts(config: ModelConfig) -> dict[str, str]:
    """The part of each layer by the prefix of its parameters' names."""
    return {prefix: layer.part for prefix, layer in architecture_of(config).prefixed_layers(config)}


def sizes_of(config: ModelConfig, name: str) -> ModelConfig:
    """The sizes of the layer that has the parameter ``name``: of the encoder of images, or of the language model."""
    return config.vision_model if part_of(config, name) == "vision" else config


def is_trained(config: ModelConfig, name: str) -> bool:
    """Whether training changes the parameter ``name``: with ``--lora-rank`` of a language model only adapters."""
    return is_trained_in(config, part_of(config, name), name)


def is_trained_in(config: ModelConfig, part: str, name: str) -> bool:
    """The same for a parameter of a layer of ``part``, by its name in the model or in the layer."""
    if not part or part in config.frozen_parts:
        return False
    return part != "language" or not config.lora_rank or ".lora." in name


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """Elements of all parameters of the model, and of the trained parameters."""
    sizes = {name: spec.numel for name, spec in architecture_of(config).named_parameters(config).items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if is_trained(config, name))


def active_parameters(config: ModelConfig) -> int:
    """Elements of the parameters that compute a token: with experts, of as many as the router chooses."""
    specs = architecture_of(config).named_parameters(config).values()
    chosen = config.moe_router_topk
    return sum(spec.numel // spec.shape[0] * chosen if spec.is_expert else spec.numel for spec in specs)


_TIED = "tied_modules."


def parameter_prefix(index: int, layer: LayerSpec) -> str:
    """What the names of a layer's parameters begin with in modules and checkpoints: its index, or its tied key."""
    return f"{index}." if layer.tied is None else f"{_TIED}{layer.tied}."


def fp8_weights(config: ModelConfig, layer: LayerSpec, tensor_parallel_size: int) -> tuple[ParameterSpec, ...]:
    """The weights of ``layer`` whose matmuls are in FP8: its matrices, without those of adapters and experts."""
    return tuple(one for one in linear_weights(layer) if _is_in_fp8(config, one, tensor_parallel_size))


def linear_weights(layer: LayerSpec) -> tuple[ParameterSpec, ...]:
    """The matrices of a transformer layer that tensor parallelism divides, without those of adapters and experts."""
    if not layer.is_block:
        return ()
    return tuple(
        one
        for one in layer.parameters
        if one.shard_dim is not None
        and len(one.shape) > 1
        and not (one.is_expert or ".lora." in one.name)
        and one.name.endswith(".weight")
    )


def _is_in_fp8(config: ModelConfig, weight: ParameterSpec, t: int) -> bool:
    inputs = weight.shape[-1]
    divides_inputs = weight.shard_dim == len(weight.shape) - 1
    return runs_in_fp8(config, inputs, weight.numel // inputs, (t, 1) if divides_inputs else (1, t))


ARCHITECTURES: dict[str, ArchitectureSpec] = {}
"""Every registered architecture by name."""


def register(spec: ArchitectureSpec) -> ArchitectureSpec:
    """Make an architecture known by its name, under which configs and checkpoints refer to it."""
    ARCHITECTURES[spec.name] = spec
    return spec


def architecture_of(config: ModelConfig) -> ArchitectureSpec:
    """The registered architecture of ``config``.

    Raises:
        ConfigError: It is not registered in this process, since its entry script was not imported.
    """
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"the model {config.architecture} is unknown (known: {known}): name its entry script with --program"
        )
    return ARCHITECTURES[config.architecture]


def model_flops(run: RunConfig) -> float:
    """FLOPs of one iteration, forward and backward, without recomputation (arXiv 2205.05198, appendix A)."""
    layers = architecture_of(run.model).layers(run.model)
    return 3 * _forward_flops(run, layers) - _tokens(run) * sum(layer.frozen_flops for layer in layers)


def hardware_flops(run: RunConfig) -> float:
    """FLOPs of one iteration with the forward passes that are recomputed (arXiv 2104.04473, section 5.1)."""
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
