"""The layers that the architectures share, each with its parameters, cost and activations. No torch here.

h hidden, f inside the MLP, q columns of all query heads, k of all key heads, v padded vocabulary
"""

from dataclasses import replace

from megatron.config import ModelConfig
from megatron.config.adapters import LORA_TARGETS
from megatron.model.spec import (
    KeptActivations,
    LayerSpec,
    ParameterSpec,
    column_parallel,
    column_parallel_adapter,
    expert_parameters,
    norm_parameters,
    row_parallel,
    row_parallel_adapter,
)

EMBED = "embed"
"""Key of the layers that share the word embedding: the first, and the head."""

BLOCK = "megatron.model.transformer:ParallelTransformerLayer"


def transformer_layer(config: ModelConfig, module: str = BLOCK) -> LayerSpec:
    """Attention and MLP. Kept: inputs of norms and linears, query, key, value, context, inside the MLP."""
    h, f, norm, bias = config.hidden_size, config.ffn_hidden_size, config.normalization, config.linear_bias
    q, k = config.num_attention_heads * config.head_size, config.query_groups * config.head_size
    matrices = 2 if config.is_gated else 1
    head_norms = [
        parameter
        for name in ("q_layernorm", "k_layernorm")
        for parameter in norm_parameters(f"attention.{name}", config.head_size, norm)
    ]
    ranks = dict.fromkeys(LORA_TARGETS, 0) | dict.fromkeys(config.adapted, config.lora_rank)
    parameters = (
        *norm_parameters("input_layernorm", h, norm),
        *column_parallel("attention.query_key_value", h, q + 2 * k, bias=config.qkv_bias),
        *column_parallel_adapter("attention.query_key_value", h, q + 2 * k, ranks["query_key_value"]),
        *(head_norms if config.qk_layernorm else ()),
        *row_parallel("attention.dense", q, h, bias=bias),
        *row_parallel_adapter("attention.dense", q, h, ranks["dense"]),
        *norm_parameters("post_attention_layernorm", h, norm),
        *column_parallel("mlp.dense_h_to_4h", h, f, bias=bias, parts=matrices),
        *column_parallel_adapter("mlp.dense_h_to_4h", h, f, ranks["dense_h_to_4h"], parts=matrices),
        *row_parallel("mlp.dense_4h_to_h", f, h, bias=bias),
        *row_parallel_adapter("mlp.dense_4h_to_h", f, h, ranks["dense_4h_to_h"]),
    )
    kept = KeptActivations(
        residual=2 * h,
        local=2 * h,
        masks=2 * h,
        statistics=4 if norm == "LayerNorm" else 2,
        # With SwiGLU gate and up, and their product; with GELU for it the activated gate, too. A norm of heads keeps
        # its input. Of an MLP in tiles its input is kept alone.
        sharded=2 * q
        + 2 * k
        + (0 if config.tiled_mlp else (4 if config.geglu else 3 if config.swiglu else 2) * f)
        + (q + k if config.qk_layernorm else 0),
    )
    if config.lora_rank:
        kept = _with_adapters(kept, config)
    in_mlp = 2 * (matrices + 1) * h * f
    linears = 2 * h * (2 * q + 2 * k) + in_mlp
    return LayerSpec(
        module,
        parameters=parameters,
        matmul_flops=linears + 2 * sum(parameter.numel for parameter in parameters if ".lora." in parameter.name),
        frozen_flops=linears if config.lora_rank else 0,
        repeated_flops=in_mlp if config.tiled_mlp else 0,
        attention_size=q,
        kept=kept,
        is_block=True,
    )


def moe_layer(config: ModelConfig) -> LayerSpec:
    """The same with experts in place of the MLP, and perhaps one for all tokens.

    Kept besides what attention keeps: the router's input in fp32 and its probabilities, and of each chosen expert its
    input, what is inside it, and its output.
    """
    h, f, experts, chosen = config.hidden_size, config.expert_size, config.num_experts, config.moe_router_topk
    shared, bias, matrices = config.moe_shared_expert_intermediate_size, config.linear_bias, 2 if config.is_gated else 1
    dense, width = transformer_layer(config), 3 if config.is_gated else 2
    attention = tuple(parameter for parameter in dense.parameters if not parameter.name.startswith("mlp."))
    of_shared = (
        *column_parallel("mlp.shared_expert.dense_h_to_4h", h, shared, bias=bias, parts=matrices),
        *row_parallel("mlp.shared_expert.dense_4h_to_h", shared, h, bias=bias),
    )
    parameters = (
        *attention,
        ParameterSpec("mlp.router.weight", (experts, h)),
        *expert_parameters("mlp.experts", experts, h, f, parts=matrices),
        *(of_shared if shared else ()),
    )
    inside = width * (chosen * f + shared - config.ffn_hidden_size)
    products = chosen * f + shared - config.ffn_hidden_size
    return replace(
        dense,
        module="megatron.model.moe:MoEParallelTransformerLayer",
        parameters=parameters,
        matmul_flops=dense.matmul_flops + 2 * h * ((matrices + 1) * products + experts),
        kept=replace(
            dense.kept,
            local=dense.kept.local + 2 * chosen * h,
            statistics=dense.kept.statistics + h + 3 * experts,
            sharded=dense.kept.sharded + inside,
        ),
    )


def _with_adapters(kept: KeptActivations, config: ModelConfig) -> KeptActivations:
    """What a transformer layer keeps whose own weights are frozen.

    Inputs of linear layers without an adapter are not kept, outputs of A are, and so are inputs of A and their masks
    if they have dropout.
    """
    chosen, copies = config.adapted, 2 if config.lora_dropout else 1
    h, f, q = config.hidden_size, config.ffn_hidden_size, config.num_attention_heads * config.head_size
    inputs = copies * h * len({"query_key_value", "dense_h_to_4h"}.intersection(chosen))
    inside_mlp = f * (copies if "dense_4h_to_h" in chosen else 0) - f
    if config.tiled_mlp:
        inside_mlp, inputs = 0, h + copies * h * len({"query_key_value"}.intersection(chosen))
        chosen = tuple(target for target in chosen if target in ("query_key_value", "dense"))
    context = q * (copies - 1 if "dense" in chosen else 0)  # attention keeps it in any case
    return replace(kept, local=inputs + config.lora_rank * len(chosen), sharded=kept.sharded + inside_mlp + context)


WORDS = "megatron.model.embedding:WordEmbedding"


def word_embedding(config: ModelConfig, module: str = WORDS) -> LayerSpec:
    """The table of tokens. Kept: the tokens, and which of them another tensor-parallel rank looks up."""
    table = ParameterSpec(
        "word_embeddings.weight", (config.padded_vocab_size, config.hidden_size), shard_dim=0, is_vocabulary=True
    )
    return LayerSpec(module, parameters=(table,), kept=KeptActivations(index_bytes=9), tied=EMBED)


def word_logits(config: ModelConfig, module: str = WORDS) -> LayerSpec:
    """The same table as the output projection. Kept: its input; the logits are counted with the loss."""
    h, table = config.hidden_size, word_embedding(config, module)
    flops = 2 * table.numel
    frozen = flops if config.lora_rank else 0
    return replace(
        table,
        forward="megatron.model.embedding:to_logits",
        matmul_flops=flops,
        frozen_flops=frozen,
        kept=KeptActivations(local=0 if frozen else h),
    )


def output_layer(config: ModelConfig) -> LayerSpec:
    """An output projection of its own."""
    (table,) = word_embedding(config).parameters
    return replace(
        word_logits(config, "megatron.model.embedding:OutputLayer"),
        forward="",
        parameters=(replace(table, name="weight"),),
        tied=None,
    )


def positions(config: ModelConfig, *, passes_segment_ids: bool = False) -> LayerSpec:
    """The table of positions if the model has one, and the dropout of the embedded tokens. Kept: its mask."""
    h = config.hidden_size
    table = ParameterSpec("position_embeddings.weight", (config.max_position_embeddings, h))
    return LayerSpec(
        f"megatron.model.embedding:{'PositionEmbedding' if config.has_position_table else 'EmbeddingDropout'}",
        arguments={"passes_segment_ids": passes_segment_ids},
        parameters=(table,) if config.has_position_table else (),
        kept=KeptActivations(masks=h),
    )


def final_norm(config: ModelConfig) -> LayerSpec:
    """The norm after the last block. Kept: its input."""
    h, kind = config.hidden_size, config.normalization
    statistics = 2 if kind == "LayerNorm" else 1
    return LayerSpec(
        "megatron.model.embedding:final_norm",
        name=kind,
        parameters=norm_parameters("", h, kind),
        kept=KeptActivations(residual=h, statistics=statistics),
    )


WITHOUT_SEGMENT_IDS = LayerSpec(forward="megatron.model.embedding:without_segment_ids")
