"""The spec of LLaVA (arXiv 2304.08485): an encoder of images, a projector, and any GPT-2 or Llama. No torch here."""

from dataclasses import replace
from fractions import Fraction

from megatron.config import ModelConfig
from megatron.model.architectures.gpt2 import GPT2
from megatron.model.architectures.layers import (
    column_parallel,
    norm_parameters,
    replicated_linear,
    row_parallel,
    transformer_layer,
)
from megatron.model.spec import ArchitectureSpec, LayerSpec, ParameterSpec, times

VISION_LAYERS = "megatron.model.llava"


def _llava(config: ModelConfig) -> list[LayerSpec]:
    """tokens [b, s] and images -> logits [b, s, v/t]. Costs are per token of the text."""
    language = GPT2.layers(config.language_model)
    words = language[0].module
    tokens = Fraction(config.images_per_sample * config.encoder_tokens, config.text_seq_length or 1)
    embedding = f"{VISION_LAYERS}:ImageEmbedding"
    of_text = [replace(one, module=embedding) if one.module == words else one for one in language]
    if config.freeze_language_model:
        of_text = [replace(one, frozen_flops=one.matmul_flops) for one in of_text]
    block = replace(
        transformer_layer(config.vision_model, f"{VISION_LAYERS}:VisionParallelTransformerLayer"), part="vision"
    )
    encoder = [_patch_embedding(config), *[_scaled(block, tokens, config.freeze_vision)] * config.vision_layers]
    unused = LayerSpec(f"{VISION_LAYERS}:UnusedWeights", parameters=_unused(config), part="")
    projector = _scaled(_projector(config), tokens, config.freeze_projector)
    return [*encoder, unused, projector, *of_text]


def _scaled(layer: LayerSpec, tokens: Fraction, is_frozen: bool) -> LayerSpec:
    """``layer`` with its costs for that many tokens for each one of the text."""
    flops = round(layer.matmul_flops * tokens)
    return replace(
        layer,
        matmul_flops=flops,
        frozen_flops=flops if is_frozen else 0,
        attention_size=round(layer.attention_size * tokens * tokens),
        kept=times(layer.kept, Fraction(0) if is_frozen else tokens),
    )


def _patch_embedding(config: ModelConfig) -> LayerSpec:
    h, patch = config.vision_hidden_size, config.vision_patch_size
    patches = ParameterSpec("patch_embedding.weight", (h, 3, patch, patch))
    table = ParameterSpec("position_embedding.weight", (config.encoder_tokens, h))
    if config.has_class_token:
        token = ParameterSpec("class_embedding", (h,), weight_decay=False)
        parameters = (token, patches, table, *norm_parameters("pre_layrnorm", h))
    else:
        parameters = (patches, ParameterSpec("patch_embedding.bias", (h,), weight_decay=False), table)
    return LayerSpec(f"{VISION_LAYERS}:PatchEmbedding", parameters=parameters, part="vision")


def _projector(config: ModelConfig) -> LayerSpec:
    v, h = config.vision_hidden_size, config.hidden_size
    parameters = (*column_parallel("linear_1", v, h), *row_parallel("linear_2", h, h))
    return LayerSpec(
        f"{VISION_LAYERS}:Projector", parameters=parameters, matmul_flops=2 * h * (v + h), part="projector"
    )


def _unused(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The weights of transformers' encoder after the layer that the projector reads, and its last norm."""
    h, f = config.vision_hidden_size, config.vision_ffn_hidden_size
    linears = {f"self_attn.{name}_proj": (h, h) for name in ("q", "k", "v", "out")}
    linears |= {"mlp.fc1": (f, h), "mlp.fc2": (h, f)}
    layer = (
        *(parameter for n in (1, 2) for parameter in norm_parameters(f"layer_norm{n}", h)),
        *(parameter for name, shape in linears.items() for parameter in replicated_linear(name, *shape[::-1])),
    )
    return (
        *(
            replace(parameter, name=f"encoder.layers.{number}.{parameter.name}")
            for number in range(config.vision_layers, config.vision_num_layers)
            for parameter in layer
        ),
        *norm_parameters("post_layernorm", h),
    )


LLAVA = ArchitectureSpec(
    "LLaVA",
    "pretrain_vlm.py",
    GPT2.tokenizers,
    _llava,
    loss="megatron.model.loss:lm_loss",
    reads_images=True,
    defaults=("--sft",),
)
