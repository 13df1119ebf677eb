"""Spec of LLaVA (arXiv 2304.08485): a vision encoder, a projector, and a GPT-2 or Llama model. No torch here."""

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
from megatron.model.spec import ArchitectureSpec, KeptActivations, LayerSpec, ParameterSpec, times

VISION_LAYERS = "megatron.model.llava"


def _llava(config: ModelConfig) -> list[LayerSpec]:
    """tokens [b, s] and images -> logits [b, s, v/t]. Costs are per text token."""
    language = GPT2.layers(config.language_model)
    word_embedding = language[0].module
    embedding = f"{VISION_LAYERS}:ImageEmbedding"
    language = [replace(layer, module=embedding) if layer.module == word_embedding else layer for layer in language]
    if config.freeze_language_model:
        language = [replace(layer, frozen_flops=layer.matmul_flops) for layer in language]
    block = replace(
        transformer_layer(config.vision_model, f"{VISION_LAYERS}:VisionParallelTransformerLayer"), part="vision"
    )
    keeps = not config.freeze_vision
    block = _per_token(block, config, has_backward=keeps)
    projector = _per_token(_projector(config), config, has_backward=keeps or not config.freeze_projector)
    return [
        _per_token(_patch_embedding(config), config, has_backward=keeps),
        *[block] * config.vision_layers,
        LayerSpec(f"{VISION_LAYERS}:UnusedWeights", parameters=_unused(config), part=""),
        projector,
        *language,
    ]


def _per_token(layer: LayerSpec, config: ModelConfig, *, has_backward: bool) -> LayerSpec:
    """Convert the costs of ``layer`` from per encoder token to per text token."""
    tokens = Fraction(config.image_slots * config.encoder_tokens, config.text_samples * config.text_seq_length or 1)
    scaled = replace(
        layer,
        matmul_flops=round(layer.matmul_flops * tokens),
        attention_size=round(layer.attention_size * tokens * config.encoder_tokens / (config.text_seq_length or 1)),
        kept=times(layer.kept, tokens if has_backward else Fraction(0)),
    )
    return scaled if has_backward else replace(scaled, frozen_flops=2 * scaled.flops(config.text_seq_length))


def _patch_embedding(config: ModelConfig) -> LayerSpec:
    h, patch = config.vision_hidden_size, config.vision_patch_size
    patches = ParameterSpec("patch_embedding.weight", (h, 3, patch, patch))
    table = ParameterSpec("position_embedding.weight", (config.encoder_tokens, h))
    if config.has_class_token:
        token = ParameterSpec("class_embedding", (h,), weight_decay=False)
        parameters = (token, patches, table, *norm_parameters("pre_layrnorm", h))
    else:
        parameters = (patches, ParameterSpec("patch_embedding.bias", (h,), weight_decay=False), table)
    kept = KeptActivations(local=3 * patch * patch + 2 * h, statistics=2 * config.has_class_token)
    return LayerSpec(
        f"{VISION_LAYERS}:PatchEmbedding",
        parameters=parameters,
        matmul_flops=2 * patches.numel,
        kept=kept,
        part="vision",
    )


def _projector(config: ModelConfig) -> LayerSpec:
    v, h = config.vision_hidden_size, config.hidden_size
    parameters = (*column_parallel("linear_1", v, h), *row_parallel("linear_2", h, h))
    return LayerSpec(
        f"{VISION_LAYERS}:Projector",
        parameters=parameters,
        matmul_flops=2 * h * (v + h),
        kept=KeptActivations(local=v, sharded=2 * h),
        part="projector",
    )


def _unused(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Weights of the encoder in Hugging Face files that are not computed: layers after the feature layer, last norm."""
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
