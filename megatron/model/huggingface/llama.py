"""Hugging Face formats of the Llama family: Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE.

See ``formats``. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.common.errors import ConfigError
from megatron.config import ModelConfig
from megatron.config.fields import shown
from megatron.model.architectures import GPT2
from megatron.model.huggingface.formats import RESIDUAL, Fields, Format, Names, read_end
from megatron.model.huggingface.rotation import NAMES, read_rotation, write_rotation
from megatron.model.spec import LayerSpec


@dataclass(frozen=True)
class ExpertNames:
    """Names of the router, experts and MoE sizes in a family's weights and config.json."""

    router: str
    experts: str
    matrices: tuple[str, str, str]
    """Names of gate, up and down projection."""
    sizes: Names


@dataclass(frozen=True)
class Family:
    """The features of one ``model_type`` of the Llama family."""

    model_type: str
    class_name: str
    qkv_bias: bool = False
    """Whether only queries, keys and values have a bias."""
    qk_layernorm: bool = False
    has_window: bool = False
    """Whether ``sliding_window`` limits attention in every layer."""
    experts: ExpertNames | None = None
    """None for layers with an MLP."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults in transformers that are not those of ``_DEFAULTS``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """As in ``Format``."""


_DEFAULTS = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "max_position_embeddings": 2048, "eos_token_id": 2},
}
_MISTRAL = {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_QWEN = {
    **{"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "eos_token_id": None,
}
_MIXTRAL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN_MOE = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM", has_window=True, defaults={**_MISTRAL, "sliding_window": 4096}),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, defaults=_QWEN),
        Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True, defaults={**_QWEN, "head_dim": 128}),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            has_window=True,
            aliases={"num_experts": "num_local_experts"},
            defaults={**_MISTRAL, **_MIXTRAL},
            experts=ExpertNames(
                "block_sparse_moe.gate",
                "block_sparse_moe.experts",
                ("w1", "w3", "w2"),
                {"num_experts": ("num_local_experts", None), "moe_router_topk": ("num_experts_per_tok", None)},
            ),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_layernorm=True,
            aliases={"num_local_experts": "num_experts"},  # transformers 5 writes Mixtral's name
            defaults={**_QWEN, **_QWEN_MOE},
            experts=ExpertNames(
                "mlp.gate",
                "mlp.experts",
                ("gate_proj", "up_proj", "down_proj"),
                {
                    "num_experts": ("num_experts", None),
                    "moe_router_topk": ("num_experts_per_tok", None),
                    "moe_ffn_hidden_size": ("moe_intermediate_size", None),
                },
            ),
        ),
    )
}

_SIZES: Names = {
    "num_layers": ("num_hidden_layers", None),
    "hidden_size": ("hidden_size", None),
    "ffn_hidden_size": ("intermediate_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "num_query_groups": ("num_key_value_heads", 0),
    "kv_channels": ("head_dim", 0),
    "max_position_embeddings": ("max_position_embeddings", None),
    "vocab_size": ("vocab_size", None),
}
_NUMBERS = {
    "layernorm_epsilon": ("rms_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "init_method_std": ("initializer_range", 0.02),
}
_ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Settings of Qwen3-MoE with which all layers have experts."""
_LAYER_TYPES = "full_attention", "sliding_attention"


def _read(family: Family, tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    rotation, problems = read_rotation(tree)
    biases = {bool(tree.get("attention_bias")), bool(tree.get("mlp_bias"))}
    if len(biases) > 1 or (True in biases and family.model_type != "llama"):
        problems.append("attention_bias and mlp_bias differ, and only both or neither can be taken over")
    window, kinds = tree.get("sliding_window"), tree.get("layer_types") or None
    has_only = {kind: isinstance(kinds, list) and all(each == kind for each in kinds) for kind in _LAYER_TYPES}
    if not family.has_window and tree.get("use_sliding_window"):
        problems.append("use_sliding_window is true, and only Mistral and Mixtral may have a window")
    # Of a Mistral, transformers' Auto classes make a Ministral with these settings; Mixtral does not have them.
    if not family.has_window or (family.model_type == "mistral" and has_only["full_attention"]):
        window = None
    kind = _LAYER_TYPES[window is not None]
    if kinds and not has_only[kind] and family.model_type != "mixtral":
        problems.append(f"layer_types is {shown(kinds)}, and only {kind} in all layers is supported")
    if window is not None and not (type(window) is int and window > 0):
        problems.append(f"sliding_window is {window!r}, and should be a whole number above 0")
    return {
        "position_embedding_type": "rope",
        **rotation,
        **({} if window is None or problems else {"pre_tokens": window - 1, "pre_tokens_given": True}),
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True not in biases,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_layernorm,
        "moe_router_pre_softmax": family.model_type == "qwen3_moe" and not tree.get("norm_topk_prob", False),
        "untie_embeddings_and_output_weights": not tree.get("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        **read_end(tree),
    }, problems


def _derive(values: Fields) -> Fields:
    heads = values["num_attention_heads"]
    return {
        "num_query_groups": values["num_query_groups"] or heads,
        "kv_channels": values["kv_channels"] or values["hidden_size"] // heads,
        "eod_token": values.get("eod_token", values["vocab_size"] - 1),
    }


def _missing(config: ModelConfig) -> dict[str, bool]:
    return {
        "--normalization RMSNorm": config.normalization != "RMSNorm",
        "--swiglu": not config.swiglu,
        "--position-embedding-type rope": not config.has_rotary_embedding,
        "--rotary-percent 1": config.rotary_percent != 1,
        RESIDUAL: config.apply_residual_connection_post_layernorm,
        "experts in every layer": config.expert_layers not in ("", f"[1]*{config.num_layers}"),
        "only chosen experts": config.moe_shared_expert_intermediate_size > 0,
        "a combination of biases, norms of heads, experts and --pre-tokens": not _families_of(config),
    }


def _families_of(config: ModelConfig) -> list[Family]:
    """The families with the biases, QK-norm, experts and attention window of ``config``."""
    traits = (config.has_experts, config.qkv_bias and not config.linear_bias, config.qk_layernorm)
    return [
        family
        for family in FAMILIES.values()
        if (family.experts is not None, family.qkv_bias, family.qk_layernorm) == traits
        # Mixtral may have a window or not.
        and (family.has_window == config.has_window or (family.model_type == "mixtral" and not config.has_window))
        and not (family.model_type == "mixtral" and config.moe_router_pre_softmax)
        and not (family.model_type != "llama" and config.linear_bias)
    ]


def family_of(config: ModelConfig) -> Family:
    """The family whose format supports all settings of ``config``.

    Raises ConfigError with a line for each setting that no family supports.
    """
    problems = [name for name, is_missing in _missing(config).items() if is_missing]
    if config.architecture != GPT2.name or problems:
        raise ConfigError(
            f"the model was trained without {name}, which Hugging Face's Llama has; use merge" for name in problems
        )
    return _families_of(config)[0]


def _write(config: ModelConfig) -> dict[str, Any]:
    family = family_of(config)
    tree: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rope_parameters": write_rotation(config),
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "eos_token_id": config.eod_token,
    }
    if family.model_type == "llama":
        tree |= {"attention_bias": config.linear_bias, "mlp_bias": config.linear_bias}
    if family.has_window:
        tree["sliding_window"] = config.pre_tokens + 1 if config.has_window else None
    if family.experts:
        tree |= {theirs: getattr(config, ours) for ours, (theirs, _) in family.experts.sizes.items()}
    if family.model_type == "mixtral":
        tree["intermediate_size"] = config.expert_size
    if family.model_type == "qwen3_moe":
        tree |= {**_ALL_LAYERS, "norm_topk_prob": not config.moe_router_pre_softmax}
        tree["moe_intermediate_size"] = config.expert_size
    return tree


_BLOCK_MODULES = {
    "input_layernorm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_layernorm": ("self_attn.q_norm",),
    "attention.k_layernorm": ("self_attn.k_norm",),
    "attention.dense": ("self_attn.o_proj",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "mlp.dense_h_to_4h": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}
_OTHER_MODULES = {"WordEmbedding": "model.embed_tokens", "RMSNorm": "model.norm", "OutputLayer": "lm_head"}
"""Class of a layer that is not a transformer layer to its module in Hugging Face files."""


def _names(config: ModelConfig, block: int, layer: LayerSpec, module: str) -> list[str]:
    if not layer.is_block:
        return [_OTHER_MODULES[layer.class_name]]
    names = _BLOCK_MODULES.get(module, ())
    if module.startswith(("mlp.router", "mlp.experts")):
        experts = family_of(config).experts
        assert experts is not None, "a family has experts if its models have"
        *gate_and_up, down = experts.matrices
        matrices = gate_and_up if module.endswith("dense_h_to_4h") else [down]
        modules = (f"{experts.experts}.{n}.{matrix}" for n in range(config.num_experts) for matrix in matrices)
        names = (experts.router,) if module == "mlp.router" else tuple(modules)
    return [f"model.layers.{block}.{name}" for name in names]


def _format(family: Family) -> Format:
    return Format(
        title="Llama",
        aliases=family.aliases,
        sizes={**_SIZES, **(family.experts.sizes if family.experts else {})},
        numbers=_NUMBERS,
        fixed={"hidden_act": "silu", **(_ALL_LAYERS if family.experts else {})},
        defaults={**_DEFAULTS, **family.defaults},
        multiple=("num_attention_heads", "num_query_groups"),
        keeps_rows=True,
        read=partial(_read, family),
        further={**NAMES, "pre_tokens": "sliding_window", "eod_token": "eos_token_id"},
        derive=_derive,
        missing=_missing,
        write=_write,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        names=_names,
    )


LLAMA_FORMATS = {family.model_type: _format(family) for family in FAMILIES.values()}
"""``model_type`` to its format for reading; writing chooses the family from the config."""
