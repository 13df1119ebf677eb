"""The specs of GPT-2, BERT, BERT with a classifier as its head, and T5. No torch here.

By its flags, GPT-2 also is a model of the Llama family.

h hidden, f inside the MLP, q columns of all query heads, k of all key heads, v padded vocabulary
"""

from dataclasses import replace
from fractions import Fraction

from megatron.config import ModelConfig
from megatron.config.data import GPT2_BPE, HUGGINGFACE, PUBLISHED
from megatron.config.model import LORA_TARGETS
from megatron.model.spec import (
    ARCHITECTURES,
    ArchitectureSpec,
    KeptActivations,
    LayerSpec,
    ParameterSpec,
    architecture_of,
    column_parallel,
    column_parallel_adapter,
    expert_parameters,
    norm_parameters,
    register,
    replicated_linear,
    row_parallel,
    row_parallel_adapter,
)

__all__ = ["ARCHITECTURES", "BERT", "CLASSIFIER", "GPT2", "T5", "architecture_of"]

EMBED = "embed"
"""Key of the layers that share the word embedding: the first, and the head."""


def transformer_layer(config: ModelConfig) -> LayerSpec:
    """``ParallelTransformerLayer``. Kept: inputs of norms and linears, query, key, value, context, inside the MLP."""
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
        "ParallelTransformerLayer",
        parameters,
        linears + 2 * sum(parameter.numel for parameter in parameters if ".lora." in parameter.name),
        linears if config.lora_rank else 0,
        in_mlp if config.tiled_mlp else 0,
        attention_size=q,
        kept=kept,
        is_block=True,
    )


def moe_layer(config: ModelConfig) -> LayerSpec:
    """``MoEParallelTransformerLayer``: the same with experts in place of the MLP, and perhaps one for all tokens.

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
        class_name="MoEParallelTransformerLayer",
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


def word_embedding(config: ModelConfig, class_name: str = "WordEmbedding") -> LayerSpec:
    """The table of tokens. Kept: the tokens, and which of them another tensor-parallel rank looks up."""
    table = ParameterSpec(
        "word_embeddings.weight", (config.padded_vocab_size, config.hidden_size), shard_dim=0, is_vocabulary=True
    )
    return LayerSpec(class_name, (table,), kept=KeptActivations(index_bytes=9), tied=EMBED)


def word_logits(config: ModelConfig, class_name: str = "WordEmbedding") -> LayerSpec:
    """The same table as the output projection. Kept: its input; the logits are counted with the loss."""
    h, table = config.hidden_size, word_embedding(config, class_name)
    flops = 2 * table.numel
    frozen = flops if config.lora_rank else 0
    return replace(table, matmul_flops=flops, frozen_flops=frozen, kept=KeptActivations(local=0 if frozen else h))


def output_layer(config: ModelConfig) -> LayerSpec:
    """An output projection of its own."""
    (table,) = word_embedding(config).parameters
    return replace(
        word_logits(config), class_name="OutputLayer", parameters=(replace(table, name="weight"),), tied=None
    )


def position_embedding(config: ModelConfig) -> LayerSpec:
    """The table of positions. Kept: the mask of the dropout that follows."""
    h = config.hidden_size
    table = ParameterSpec("position_embeddings.weight", (config.max_position_embeddings, h))
    return LayerSpec("PositionEmbedding", (table,), kept=KeptActivations(masks=h))


def embedding_dropout(config: ModelConfig) -> LayerSpec:
    """The dropout after the word embedding of a model without a table of positions. Kept: its mask."""
    return LayerSpec("EmbeddingDropout", kept=KeptActivations(masks=config.hidden_size))


def final_norm(config: ModelConfig) -> LayerSpec:
    """The norm after the last block. Kept: its input."""
    h, kind = config.hidden_size, config.normalization
    statistics = 2 if kind == "LayerNorm" else 1
    return LayerSpec(kind, norm_parameters("", h, kind), kept=KeptActivations(residual=h, statistics=statistics))


WITHOUT_SEGMENT_IDS = LayerSpec("without_segment_ids")


def _gpt2(config: ModelConfig) -> list[LayerSpec]:
    untied, words = config.untie_embeddings_and_output_weights, word_embedding(config)
    return [
        replace(words, tied=None) if untied else words,
        position_embedding(config) if config.has_position_table else embedding_dropout(config),
        *_blocks(config),
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
        output_layer(config) if untied else word_logits(config),
    ]


def _blocks(config: ModelConfig) -> list[LayerSpec]:
    if not config.has_experts:
        return [transformer_layer(config)] * config.num_layers
    dense, experts = transformer_layer(config), moe_layer(config)
    return [experts if config.layer_has_experts(n + 1) else dense for n in range(config.num_layers)]


def _bert(config: ModelConfig) -> list[LayerSpec]:
    bias = ParameterSpec("word_bias", (config.padded_vocab_size,), 0, weight_decay=False, is_vocabulary=True)
    return [
        *_encoder(config),
        _pair_head(config),
        word_logits(config, "PairEmbedding"),
        LayerSpec("WordBias", (bias,)),
    ]


def _encoder(config: ModelConfig) -> list[LayerSpec]:
    """BERT without its head."""
    table = ParameterSpec("tokentype_embeddings.weight", (2, config.hidden_size))
    return [
        word_embedding(config, "PairEmbedding"),
        LayerSpec("TokenTypeEmbedding", (table,)),
        position_embedding(config),
        *[transformer_layer(config)] * config.num_layers,
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
    ]


def _pair_head(config: ModelConfig) -> LayerSpec:
    """``PairHead``. Kept: input and output of its linear and of GELU; the pooler sees one token of each sample."""
    h = config.hidden_size
    parameters = (
        *replicated_linear("dense", h, h),
        *norm_parameters("layernorm", h),
        *replicated_linear("pooler", h, h),
        *replicated_linear("order", h, 2),
    )
    return LayerSpec("PairHead", parameters, 2 * h * h, kept=KeptActivations(local=3 * h, statistics=2))


def _classifier(config: ModelConfig) -> list[LayerSpec]:
    """BERT's layers with another head, whose pooler has the place and the name of the pretrained one."""
    h = config.hidden_size
    parameters = (*replicated_linear("pooler", h, h), *replicated_linear("classifier", h, len(config.classes)))
    return [*_encoder(config), LayerSpec("ClassifierHead", parameters)]


def _t5(config: ModelConfig) -> list[LayerSpec]:
    """Costs are per token of the encoder, those of the decoder too, which reads fewer."""
    untied, words = config.untie_embeddings_and_output_weights, word_embedding(config, "T5Embedding")
    ratio = _decoder_tokens(config)
    embedding = replace(words, kept=_times(words.kept, ratio))
    norm = final_norm(config)
    head = output_layer(config) if untied else word_logits(config, "T5Embedding")
    return [
        words,
        _stack_positions(config),
        *_stack(config, encoder_layer(config), config.encoder_num_layers, "encoder"),
        replace(norm, class_name="EncoderNorm", kept=replace(norm.kept, local=config.hidden_size)),
        embedding,
        _stack_positions(config, ratio),
        *_stack(config, decoder_layer(config), config.decoder_num_layers, "decoder"),
        LayerSpec("without_encoder_output"),
        replace(norm, kept=_times(norm.kept, ratio)),
        replace(head, matmul_flops=round(head.matmul_flops * ratio), kept=_times(head.kept, ratio)),
    ]


def encoder_layer(config: ModelConfig) -> LayerSpec:
    """``EncoderParallelTransformerLayer``: a transformer layer whose tokens attend to the whole text."""
    return replace(transformer_layer(config), class_name="EncoderParallelTransformerLayer")


def decoder_layer(config: ModelConfig) -> LayerSpec:
    """``DecoderParallelTransformerLayer``, which also attends to the encoder's output."""
    h, q, ratio = config.hidden_size, config.num_attention_heads * config.head_size, _decoder_tokens(config)
    bias, norm, own = config.linear_bias, config.normalization, transformer_layer(config)
    parameters = (
        *own.parameters,
        *column_parallel("inter_attention.query", h, q, bias=bias),
        *column_parallel("inter_attention.key_value", h, 2 * q, bias=bias),
        *row_parallel("inter_attention.dense", q, h, bias=bias),
        *norm_parameters("post_inter_attention_layernorm", h, norm),
    )
    statistics = 2 if norm == "LayerNorm" else 1
    across = KeptActivations(residual=h, local=h, masks=h, statistics=statistics, sharded=2 * q)
    both = KeptActivations(**{name: value + getattr(across, name) for name, value in vars(own.kept).items()})
    kept = _times(both, ratio)
    return LayerSpec(
        "DecoderParallelTransformerLayer",
        parameters,
        round(ratio * (own.matmul_flops + 4 * h * q)) + 4 * h * q,
        repeated_flops=round(ratio * own.repeated_flops),
        attention_size=round(q * (ratio * ratio + ratio)),
        cross_attention_size=round(q * ratio),
        kept=replace(kept, sharded=kept.sharded + 2 * q),
        is_block=True,
    )


def _stack(config: ModelConfig, layer: LayerSpec, count: int, name: str) -> list[LayerSpec]:
    """``count`` times ``layer``, with the table of relative positions that all of them read."""
    shape = (config.relative_attention_num_buckets, config.num_attention_heads)
    table = LayerSpec("RelativePositions", (ParameterSpec("weight", shape, shard_dim=1),), tied=f"{name}_positions")
    return [*((table,) if config.has_relative_positions else ()), layer] * count


def _stack_positions(config: ModelConfig, ratio: Fraction = Fraction(1)) -> LayerSpec:
    """What is added to the embedded tokens of a stack: both read one table of positions."""
    if not config.has_position_table:
        layer = embedding_dropout(config)
        return replace(layer, class_name="StackDropout", kept=_times(layer.kept, ratio))
    layer = position_embedding(config)
    return replace(layer, class_name="StackPositions", tied="positions", kept=_times(layer.kept, ratio))


def _decoder_tokens(config: ModelConfig) -> Fraction:
    """Tokens of the decoder for each of the encoder."""
    return Fraction(config.decoder_seq_length or 1, config.encoder_seq_length or 1)


def _times(kept: KeptActivations, ratio: Fraction) -> KeptActivations:
    return KeptActivations(**{name: round(value * ratio) for name, value in vars(kept).items()})


GPT2 = register(
    ArchitectureSpec(
        "GPT-2",
        "pretrain_gpt2.py",
        (GPT2_BPE, "WhitespaceTokenizer", *PUBLISHED),
        _gpt2,
        torch_layers="megatron.model.gpt2:gpt2_layers",
        torch_loss="megatron.model.gpt2:gpt2_loss",
    )
)
BERT = register(
    ArchitectureSpec(
        "BERT",
        "pretrain_bert.py",
        ("BertWordPieceLowerCase", "BertWordPieceCase"),
        _bert,
        torch_layers="megatron.model.bert:bert_layers",
        torch_loss="megatron.model.bert:BertLoss",
        masked_lm=True,
    )
)
CLASSIFIER = register(
    ArchitectureSpec(
        "BERT classifier",
        "tasks/main.py",
        BERT.tokenizers,
        _classifier,
        torch_layers="megatron.model.classifier:classifier_layers",
        torch_loss="megatron.model.classifier:classifier_loss",
        masked_lm=None,
    )
)
T5 = register(
    ArchitectureSpec(
        "T5",
        "pretrain_t5.py",
        (*BERT.tokenizers, HUGGINGFACE),
        _t5,
        torch_layers="megatron.model.t5:t5_layers",
        torch_loss="megatron.model.gpt2:gpt2_loss",
        masked_lm=True,
        is_encoder_decoder=True,
        # T5 1.1 (arXiv 1910.10683, and the notes on its release).
        defaults=(
            "--normalization", "RMSNorm", "--layernorm-epsilon", "1e-6", "--position-embedding-type", "relative",
            "--geglu", "--openai-gelu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
        ),
    )
)  # fmt: skip
