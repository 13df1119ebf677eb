"""Specs of layers that architectures share: parameters, FLOPs and kept activations. No torch here.

h hidden, f hidden size of the MLP, q columns of all query heads, k columns of all key heads, v padded vocabulary
"""

from dataclasses import replace

from megatron.config import ModelConfig
from megatron.config.experts import LORA_TARGETS
from megatron.config.model import ACTIVATIONS
from megatron.model.spec import KeptActivations, LayerSpec, ParameterSpec

EMBED = "embed"
"""Tied key of the layers that share the word embedding: the first layer and the head."""
BLOCK = "megatron.model.transformer:ParallelTransformerLayer"
WORDS = "megatron.model.embedding:WordEmbedding"


def transformer_layer(config: ModelConfig, module: str = BLOCK) -> LayerSpec:
    """A transformer layer. Kept: inputs of norms and linears, query, key, value, context, MLP hidden activations."""
    h, f, norm, bias = config.hidden_size, config.ffn_hidden_size, config.normalization, config.linear_bias
    q, k = config.num_attention_heads * config.head_size, config.query_groups * config.head_size
    matrices = 2 if config.is_gated else 1
    head_norms = ("attention.q_layernorm", "attention.k_layernorm") if config.qk_layernorm else ()
    ranks = dict.fromkeys(LORA_TARGETS, 0) | dict.fromkeys(config.adapted, config.lora_rank)
    parameters = (
        *norm_parameters("input_layernorm", h, norm),
        *column_parallel(
            "attention.query_key_value", h, q + 2 * k, bias=config.qkv_bias, lora_rank=ranks["query_key_value"]
        ),
        *(parameter for name in head_norms for parameter in norm_parameters(name, config.head_size, norm)),
        *row_parallel("attention.dense", q, h, bias=bias, lora_rank=ranks["dense"]),
        *norm_parameters("post_attention_layernorm", h, norm),
        *column_parallel("mlp.dense_h_to_4h", h, f, bias=bias, matrices=matrices, lora_rank=ranks["dense_h_to_4h"]),
        *row_parallel("mlp.dense_4h_to_h", f, h, bias=bias, lora_rank=ranks["dense_4h_to_h"]),
    )
    kept = KeptActivations(
        residual=2 * h,
        local=2 * h,
        masks=2 * h,
        statistics=4 if norm == "LayerNorm" else 2,
        sharded=2 * q + 2 * k + _kept_in_mlp(config) * f + (q + k if config.qk_layernorm else 0),
    )
    if config.lora_rank:
        kept = _with_adapters(kept, config)
    mlp_flops = 2 * (matrices + 1) * h * f
    linears = 2 * h * (2 * q + 2 * k) + mlp_flops
    return LayerSpec(
        module,
        parameters=parameters,
        matmul_flops=linears + 2 * sum(parameter.numel for parameter in parameters if ".lora." in parameter.name),
        frozen_flops=linears if config.lora_rank else 0,
        repeated_flops=mlp_flops if config.tiled_mlp else 0,
        attention_size=q,
        kept=kept,
        is_block=True,
    )


def _kept_in_mlp(config: ModelConfig) -> int:
    """Tensors of size f that the MLP keeps; none with --tiled-mlp."""
    return 0 if config.tiled_mlp else ACTIVATIONS[config.activation].kept - config.recompute_mlp_activation


def moe_layer(config: ModelConfig) -> LayerSpec:
    """A transformer layer with experts instead of the MLP, and optionally a shared expert for all tokens.

    Kept in addition to attention: the router's input in fp32 and its probabilities, and for each chosen expert its
    input, hidden activations and output.
    """
    h, f, experts, chosen = config.hidden_size, config.expert_size, config.num_experts, config.moe_router_topk
    shared, bias, matrices = config.moe_shared_expert_intermediate_size, config.linear_bias, 2 if config.is_gated else 1
    dense, width = transformer_layer(config), 3 if config.is_gated else 2
    attention = tuple(parameter for parameter in dense.parameters if not parameter.name.startswith("mlp."))
    shared_expert = (
        *column_parallel("mlp.shared_expert.dense_h_to_4h", h, shared, bias=bias, matrices=matrices),
        *row_parallel("mlp.shared_expert.dense_4h_to_h", shared, h, bias=bias),
    )
    parameters = (
        *attention,
        ParameterSpec("mlp.router.weight", (experts, h)),
        *expert_parameters("mlp.experts", experts, h, f, matrices=matrices),
        *(shared_expert if shared else ()),
    )
    extra = chosen * f + shared - config.ffn_hidden_size  # columns in addition to the MLP of a dense layer
    return replace(
        dense,
        module="megatron.model.moe:MoEParallelTransformerLayer",
        parameters=parameters,
        matmul_flops=dense.matmul_flops + 2 * h * ((matrices + 1) * extra + experts),
        kept=replace(
            dense.kept,
            local=dense.kept.local + 2 * chosen * h,
            statistics=dense.kept.statistics + h + 3 * experts,
            sharded=dense.kept.sharded + width * extra,
        ),
    )


def _with_adapters(kept: KeptActivations, config: ModelConfig) -> KeptActivations:
    """Kept activations of a transformer layer with frozen weights and LoRA adapters.

    Kept are the outputs of A, the inputs of A and, with dropout, their masks, but not the inputs of linear layers
    without an adapter.
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


def word_embedding(config: ModelConfig, module: str = WORDS) -> LayerSpec:
    """The word embedding. Kept: the tokens, and a mask of the tokens that other tensor-parallel ranks look up."""
    table = ParameterSpec(
        "word_embeddings.weight", (config.padded_vocab_size, config.hidden_size), shard_dim=0, is_vocabulary=True
    )
    return LayerSpec(module, parameters=(table,), kept=KeptActivations(index_bytes=9), tied=EMBED)


def word_logits(config: ModelConfig, module: str = WORDS) -> LayerSpec:
    """The word embedding as output projection. Kept: its input; the logits are counted with the loss."""
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
    """An output projection that is not tied to the word embedding."""
    (table,) = word_embedding(config).parameters
    return replace(
        word_logits(config, "megatron.model.embedding:OutputLayer"),
        forward="",
        parameters=(replace(table, name="weight"),),
        tied=None,
    )


def positions(config: ModelConfig, *, passes_segment_ids: bool = False) -> LayerSpec:
    """The position embedding, if the model has one, and the dropout after it. Kept: the dropout mask."""
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
        "megatron.model.weights:hidden_norm",
        name=kind,
        parameters=norm_parameters("", h, kind),
        kept=KeptActivations(residual=h, statistics=statistics),
    )


WITHOUT_SEGMENT_IDS = LayerSpec(forward="megatron.model.embedding:without_segment_ids")


def norm_parameters(name: str, size: int, kind: str = "LayerNorm") -> tuple[ParameterSpec, ...]:
    """Weight, and bias if it is a layer norm, of the norm ``name`` of a layer, or of a layer that is a norm itself."""
    prefix = f"{name}." if name else ""
    parts = ("weight", "bias") if kind == "LayerNorm" else ("weight",)
    return tuple(ParameterSpec(f"{prefix}{part}", (size,), weight_decay=False) for part in parts)


def replicated_linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> tuple[ParameterSpec, ...]:
    """Weight and bias of a replicated linear layer."""
    weight = ParameterSpec(f"{name}.weight", (outputs, inputs))
    return (weight, ParameterSpec(f"{name}.bias", (outputs,), weight_decay=False)) if bias else (weight,)


def column_parallel(
    name: str, inputs: int, outputs: int, *, bias: bool = True, matrices: int = 1, lora_rank: int = 0
) -> tuple[ParameterSpec, ...]:
    """Parameters of a ``ColumnParallelLinear``: weight, bias and B of its adapter are sharded along the outputs.

    A gated MLP has two ``matrices`` in one parameter.
    """

    def sharded(parameter: ParameterSpec) -> ParameterSpec:
        if matrices == 1:
            return replace(parameter, shard_dim=0)
        return replace(parameter, shape=(matrices, *parameter.shape), shard_dim=1)

    linear = [sharded(parameter) for parameter in replicated_linear(name, inputs, outputs, bias=bias)]
    if not lora_rank:
        return tuple(linear)
    a, b = ParameterSpec(f"{name}.lora.A", (lora_rank, inputs)), ParameterSpec(f"{name}.lora.B", (outputs, lora_rank))
    return (*linear, a, sharded(b))


def row_parallel(
    name: str, inputs: int, outputs: int, *, bias: bool = True, lora_rank: int = 0
) -> tuple[ParameterSpec, ...]:
    """Parameters of a ``RowParallelLinear``: the weight and A of its adapter are sharded along the inputs."""
    weight, *biases = replicated_linear(name, inputs, outputs, bias=bias)
    a = ParameterSpec(f"{name}.lora.A", (lora_rank, inputs), shard_dim=1)
    b = ParameterSpec(f"{name}.lora.B", (outputs, lora_rank))
    return (replace(weight, shard_dim=1), *biases, *((a, b) if lora_rank else ()))


def expert_parameters(
    name: str, experts: int, inputs: int, inner: int, *, matrices: int = 1
) -> tuple[ParameterSpec, ...]:
    """Weights of all experts of a layer, without biases, sharded along the ``inner`` size."""
    rows, dim = ((inner,), 1) if matrices == 1 else ((matrices, inner), 2)
    return (
        ParameterSpec(f"{name}.dense_h_to_4h.weight", (experts, *rows, inputs), dim, is_expert=True),
        ParameterSpec(f"{name}.dense_4h_to_h.weight", (experts, inputs, inner), 2, is_expert=True),
    )
