"""Writes the config.json of a model for Hugging Face's libraries. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.huggingface import HF_CONFIG, RESOLVED, config_of, format_of
from megatron.model.huggingface.formats import config_to

_TOKENS = ("bos_token_id", "eos_token_id")
_TRAINING_FIELDS = frozenset(
    """
    lora_rank lora_alpha lora_dropout lora_target moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_dtype moe_token_dispatcher_type moe_grouped_gemm moe_per_layer_logging text_seq_length text_samples
    images_per_micro_batch image_slots image_fit freeze_vision freeze_projector freeze_language_model vision_lr_mult
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity recompute_mlp_activation
    projector_lr_mult model_preset make_vocab_size_divisible_by bias_gelu_fusion bias_dropout_fusion compile tiled_mlp
    tiled_mlp_num_shards gradient_accumulation_fusion fp8_format fp8_recipe fp8_min_size
    fused_kernels attention_dropout hidden_dropout init_method_std
    apply_query_key_layer_scaling attention_softmax_in_fp32 fp16_lm_cross_entropy use_cpu_initialization shape_order
    pre_tokens pre_tokens_given fp32_residual_connection padded_vocab_size eod_token reset_position_ids
    reset_attention_mask dtype recomputes_attention seed encoder_seq_length decoder_seq_length group_query_attention
    max_position_embeddings
    """.split()
)
"""Fields that change how a model is trained or executed, but not which function its weights compute in inference."""


def write_config(config: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of config.json for ``config`` with weights of ``dtype`` (such as float32).

    Returns ``source``, the config.json that the model was read from, if it still describes the model. Raises
    ConfigError with a line for each setting that Hugging Face's model does not support.
    """
    form = format_of(config)
    tree = config_to(form, config, dtype)
    if not config.classes:  # classifiers are written, but not read
        _refuse_other_models(config, config_of(tree, Path(HF_CONFIG)))
    if source is None:
        return tree
    try:
        before = config_to(form, config_of(source, Path(HF_CONFIG)), dtype)
    except (CheckpointError, ConfigError):
        return tree
    if any(tree[name] != before.get(name) for name in tree if name not in _TOKENS):
        return tree
    name = "torch_dtype" if "torch_dtype" in source else "dtype"
    return {**source, name: dtype}


def _refuse_other_models(config: ModelConfig, read: ModelConfig) -> None:
    """Raise ConfigError if ``read``, the written configuration read again, describes another model than ``config``."""
    unused = {*_TRAINING_FIELDS, *(["ffn_hidden_size"] if config.has_experts else [])}  # which all layers have then
    for field in fields(ModelConfig):
        name = RESOLVED.get(field.name, field.name)
        if field.name not in unused and not _agree(getattr(read, name), getattr(config, name)):
            flag = field.name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(config, name)} is unknown to Hugging Face's model; use merge")


def _agree(read: Any, written: Any) -> bool:
    """Whether two values of a field are equal, numbers up to rounding: some are written as functions of others."""
    if isinstance(read, float) and isinstance(written, float):
        return math.isclose(read, written, rel_tol=1e-12)
    return bool(read == written)
