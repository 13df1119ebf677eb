"""GPT-2 in Hugging Face's format ``gpt2``; see ``formats``. No torch here."""

from collections.abc import Mapping
from typing import Any

from megatron.model.huggingface.formats import PREFIX, RESIDUAL, Fields, Format, gelu_name, named, read_end, read_gelu


def _read_gpt2(tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    fields, problems = read_gelu("activation_function", tree.get("activation_function", "gelu_new"))
    return fields | read_end(tree), problems


GPT2_FORMAT = Format(
    title="GPT-2",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    sizes={
        "num_layers": ("n_layer", 12),
        "hidden_size": ("n_embd", 768),
        "num_attention_heads": ("n_head", 12),
        "ffn_hidden_size": ("n_inner", 0),
        "max_position_embeddings": ("n_positions", 1024),
        "vocab_size": ("vocab_size", 50257),
    },
    numbers={
        "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "init_method_std": ("initializer_range", 0.02),
    },
    fixed={
        "model_type": "gpt2",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    read=_read_gpt2,
    further={"eod_token": "eos_token_id"},
    derive=lambda values: {
        "ffn_hidden_size": values["ffn_hidden_size"] or 4 * values["hidden_size"],
        "eod_token": values.get("eod_token", values["vocab_size"] - 1),
    },
    missing=lambda config: {
        "biases in all linear layers": not config.linear_bias,
        "an output projection that is the embedding": config.untie_embeddings_and_output_weights,
        "a table of positions": not config.has_position_table,
        "heads of hidden size / heads": config.head_size * config.num_attention_heads != config.hidden_size,
        "keys and values for each head": config.query_groups != config.num_attention_heads,
        "queries and keys that are not normalized": config.qk_layernorm,
        RESIDUAL: config.apply_residual_connection_post_layernorm,
        f"attention to all {config.max_position_embeddings} positions (--pre-tokens {config.pre_tokens})": (
            config.has_window
        ),
    },
    write=lambda config: {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": config.eod_token,
        "eos_token_id": config.eod_token,
        "activation_function": gelu_name(config),
        "embd_pdrop": config.hidden_dropout,
    },
    tied={"lm_head.weight": f"{PREFIX}wte.weight"},
    names=named(
        f"{PREFIX}h",
        {
            "input_layernorm": ("ln_1",),
            "attention.query_key_value": ("attn.c_attn",),
            "attention.dense": ("attn.c_proj",),
            "post_attention_layernorm": ("ln_2",),
            "mlp.dense_h_to_4h": ("mlp.c_fc",),
            "mlp.dense_4h_to_h": ("mlp.c_proj",),
        },
        {"WordEmbedding": f"{PREFIX}wte", "PositionEmbedding": f"{PREFIX}wpe", "LayerNorm": f"{PREFIX}ln_f"},
    ),
    transposes=True,
)
