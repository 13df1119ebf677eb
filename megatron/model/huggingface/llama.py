"""Models of the Llama family in Hugging Face's format: Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE.

Their config.json to and from a ModelConfig, and the names and shapes of their weights. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.architectures import GPT2
from megatron.model.huggingface.rotation import read_rotation, write_rotation
from megatron.model.huggingface.values import Shapes, our_parameters, read_values, vocabulary_problems


@dataclass(frozen=True)
class ExpertNames:
    """How a family calls the parts of a mixture of experts in a layer, and its sizes in config.json."""

    router: str
    experts: str
    matrices: tuple[str, str, str]
    """Gate, up and down."""
    sizes: Mapping[str, str]
    """Field of ModelConfig to the name of the same size."""


@dataclass(frozen=True)
class Family:
    """The differences between one ``model_type`` and the others."""

    model_type: str
    class_name: str
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias that no other linear layer has."""
    qk_layernorm: bool = False
    has_window: bool = False
    """Whether ``sliding_window`` limits attention in every layer."""
    experts: ExpertNames | None = None
    """None if its layers have an MLP."""


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM", has_window=True),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),
        Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            has_window=True,
            experts=ExpertNames(
                "block_sparse_moe.gate",
                "block_sparse_moe.experts",
                ("w1", "w3", "w2"),
                {"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
            ),
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_layernorm=True,
            experts=ExpertNames(
                "mlp.gate",
                "mlp.experts",
                ("gate_proj", "up_proj", "down_proj"),
                {
                    "num_experts": "num_experts",
                    "moe_router_topk": "num_experts_per_tok",
                    "moe_ffn_hidden_size": "moe_intermediate_size",
                },
            ),
        ),
    )
}

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Names that files may have besides, to the weights that they repeat, unless they are weights of their own."""
_SIZES = {
    "num_layers": ("num_hidden_layers", None),
    "hidden_size": ("hidden_size", None),
    "ffn_hidden_size": ("intermediate_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "max_position_embeddings": ("max_position_embeddings", None),
    "vocab_size": ("vocab_size", None),
}
_HEADS = {"num_query_groups": ("num_key_value_heads", None), "kv_channels": ("head_dim", None)}
_NUMBERS = {
    "layernorm_epsilon": ("rms_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "init_method_std": ("initializer_range", 0.02),
}
_ALL_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Settings of Qwen3-MoE by which all layers have experts."""


def read_config(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that the config.json at ``path`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    family, heads = FAMILIES[tree["model_type"]], tree.get("num_attention_heads")
    defaults = {
        "num_key_value_heads": tree.get("num_key_value_heads") or heads,
        "head_dim": tree.get("head_dim") or _quotient(tree.get("hidden_size"), heads),
        "num_experts": tree.get("num_experts", tree.get("num_local_experts")),  # transformers 5 writes the latter
    }
    sizes = {name: (theirs, None) for name, theirs in family.experts.sizes.items()} if family.experts else {}
    fixed = {"hidden_act": "silu", **(_ALL_LAYERS if family.experts else {})}
    values, problems = read_values({**tree, **defaults}, {**_SIZES, **_HEADS, **sizes}, _NUMBERS, fixed)
    rotation, rotation_problems = read_rotation(tree)
    problems += rotation_problems
    biases = {bool(tree.get("attention_bias")), bool(tree.get("mlp_bias"))}
    if len(biases) > 1 or (True in biases and family.model_type != "llama"):
        problems.append("attention_bias and mlp_bias differ, and only both or neither can be taken over")
    window, window_problems = _window(tree, family)
    problems += window_problems
    if not problems and values["num_attention_heads"] % values["num_query_groups"]:
        problems.append(
            f"num_attention_heads {values['num_attention_heads']} is not a multiple of num_key_value_heads "
            f"{values['num_query_groups']}"
        )
    problems = problems or vocabulary_problems(values["vocab_size"], vocab_size)
    if problems:
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    end = tree.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return ModelConfig(
        **values,
        **{"position_embedding_type": "rope", **rotation},
        **window,
        padded_vocab_size=values["vocab_size"],
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True not in biases,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_layernorm,
        moe_router_pre_softmax=family.model_type == "qwen3_moe" and not tree.get("norm_topk_prob", False),
        untie_embeddings_and_output_weights=not tree.get("tie_word_embeddings", False),
        hidden_dropout=0.0,
        eod_token=end if type(end) is int else values["vocab_size"] - 1,
    )


def _quotient(size: Any, heads: Any) -> Any:
    return size // heads if type(size) is int and type(heads) is int and heads > 0 else None


def _window(tree: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    window = tree.get("sliding_window")
    if family.has_window and window is not None and not (type(window) is int and window > 0):
        return {}, [f"sliding_window is {window!r}, and should be a whole number above 0"]
    if family.has_window:
        return ({} if window is None else {"pre_tokens": window - 1}), []
    if tree.get("use_sliding_window"):
        return {}, ["use_sliding_window is true, with a window in some layers only, which is not supported"]
    return {}, []


def family_of(config: ModelConfig) -> Family:
    """The family whose format has all settings of ``config``.

    Raises ConfigError with a line for each setting that none of them has.
    """
    required = {
        "--normalization RMSNorm": config.normalization == "RMSNorm",
        "--swiglu": config.swiglu,
        "--position-embedding-type rope": config.has_rotary_embedding,
        "--rotary-percent 1": config.rotary_percent == 1,
        "the residual taken before the norm": not config.apply_residual_connection_post_layernorm,
        "experts in every layer": config.expert_layers in ("", f"[1]*{config.num_layers}"),
        "only chosen experts": not config.moe_shared_expert_intermediate_size,
    }
    problems = [
        f"the model was trained without {name}, which Hugging Face's Llama has"
        for name, on in required.items()
        if not on
    ]
    has_window = config.pre_tokens < config.max_position_embeddings - 1
    traits = (config.has_experts, config.qkv_bias and not config.linear_bias, config.qk_layernorm)
    found = [
        family
        for family in FAMILIES.values()
        if (family.experts is not None, family.qkv_bias, family.qk_layernorm) == traits
        # Only Mixtral is one family with and without a window.
        and (family.has_window == has_window or (family.model_type == "mixtral" and not has_window))
        and not (family.model_type == "mixtral" and config.moe_router_pre_softmax)
    ]
    if not found or (config.linear_bias and found[0].model_type != "llama"):
        problems.append(
            "no model of Hugging Face's Llama family has this combination of biases, norms of heads, experts and "
            "--pre-tokens"
        )
    if config.architecture != GPT2.name or problems:
        raise ConfigError(f"{problem}; use merge" for problem in problems)
    return found[0]


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32). Raises as ``family_of``."""
    family = family_of(config)
    tree: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        **{theirs: getattr(config, ours) for ours, (theirs, _) in {**_SIZES, **_NUMBERS}.items()},
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rope_parameters": write_rotation(config),
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "eos_token_id": config.eod_token,
        "torch_dtype": dtype,
    }
    if family.model_type == "llama":
        tree |= {"attention_bias": config.linear_bias, "mlp_bias": config.linear_bias}
    if family.has_window:
        has_window = config.pre_tokens < config.max_position_embeddings - 1
        tree["sliding_window"] = config.pre_tokens + 1 if has_window else None
    if family.experts:
        tree |= {theirs: getattr(config, ours) for ours, theirs in family.experts.sizes.items()}
    if family.model_type == "mixtral":
        tree["intermediate_size"] = config.expert_size
    if family.model_type == "qwen3_moe":
        tree |= {**_ALL_LAYERS, "norm_topk_prob": not config.moe_router_pre_softmax}
        tree["moe_intermediate_size"] = config.expert_size
    return tree


_LAYER = {
    "input_layernorm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_layernorm": ("self_attn.q_norm",),
    "attention.k_layernorm": ("self_attn.k_norm",),
    "attention.dense": ("self_attn.o_proj",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "mlp.dense_h_to_4h": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}
_OTHERS = {
    "WordEmbedding": "model.embed_tokens.weight",
    "RMSNorm": "model.norm.weight",
    "OutputLayer": "lm_head.weight",
}
"""Class of a layer outside the blocks to the name of its weight."""


def source_shapes(config: ModelConfig) -> Shapes:
    """Our name of each weight, in the order of the layers, to name and shape of the tensors that it consists of.

    Queries, keys and values are one weight of ours, and so are gate and up.
    """
    sources: Shapes = {}
    experts, d = family_of(config).experts if config.has_experts else None, config.head_size
    rows = (config.num_attention_heads * d, config.query_groups * d, config.query_groups * d)
    for ours, block, layer, parameter in our_parameters(config):
        module, _, kind = parameter.name.rpartition(".")
        if not layer.is_block:
            sources[ours] = {_OTHERS[layer.class_name]: parameter.shape}
            continue
        if experts and module.startswith(("mlp.router", "mlp.experts")):
            names = _of_experts(experts, module, config.num_experts)
            shapes = [parameter.shape[-2:]] * len(names)
        else:
            names, rest = list(_LAYER[module]), parameter.shape[1:]
            shapes = {1: [parameter.shape], 2: [rest, rest], 3: [(size, *rest) for size in rows]}[len(names)]
        theirs = [f"model.layers.{block}.{name}.{kind}" for name in names]
        sources[ours] = dict(zip(theirs, shapes, strict=True))
    return sources


def _of_experts(names: ExpertNames, module: str, experts: int) -> list[str]:
    """The modules of a layer whose weights are those of ``module`` of ours: gate and up of one expert after another."""
    if module == "mlp.router":
        return [names.router]
    *gate_and_up, down = names.matrices
    matrices = gate_and_up if module.endswith("dense_h_to_4h") else [down]
    return [f"{names.experts}.{number}.{matrix}" for number in range(experts) for matrix in matrices]
