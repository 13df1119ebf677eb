"""The mutations: faults of parallel code that tools/verify_layout.py is to find, and to say where."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.mutations import replicas, sequences, shards

MODELS = {
    "gpt2": "",
    "llama": "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights",
    "grouped": "--group-query-attention --num-query-groups 2",
    "masked": "--eod-mask-loss",
    "moe": "--num-experts 4 --moe-aux-loss-coeff 0.1",
    "bert": "",
    "t5": "",
}
"""Flags of each model, beside its size. The last two have an entry script of their own."""


@dataclass(frozen=True)
class Mutation:
    """A fault, and where it is to be found."""

    name: str
    breaks: str
    layout: str
    expected: str
    """Part of the operation that is to be named."""
    apply: Callable[[], None]
    model: str = "gpt2"


TP, SP, CP, DP, PP = "tp2-pp0-dp1", "tp2-pp0-dp1-sp", "tp1-pp0-dp1-cp2", "tp1-pp0-dp2", "tp1-pp2-dp1"
ULYSSES, EP = "tp1-pp0-dp1-ulysses2", "tp1-pp0-dp2-ep2"
AVERAGE = "the reduction of gradients over the data-parallel ranks"

MUTATIONS = [
    Mutation("row not summed", "the all-reduce of row-parallel outputs is missing", "tp2-pp2-dp2-zero1",
             "forward pass of 2.attention.dense", shards.row_not_summed),
    Mutation("row over data group", "that all-reduce is over the data-parallel ranks", "tp2-pp0-dp2",
             "forward pass of 2.attention.dense", shards.row_over_data_group),
    Mutation("row averaged", "that all-reduce averages", TP, "forward pass of 2.attention.dense", shards.row_averaged),
    Mutation("row bias on each rank", "the bias of row-parallel layers is added before the sum", TP,
             "5.mlp.dense_4h_to_h", shards.row_bias_on_each_rank),
    Mutation("column not summed", "the all-reduce of the gradients of column-parallel inputs is missing",
             "tp2-pp2-dp1", "backward pass of 8", shards.column_not_summed),
    Mutation("column summed twice", "those gradients are reduced twice", TP, "backward pass of 8",
             shards.column_summed_twice),
    Mutation("embedding not summed", "the all-reduce of the word embedding is missing", TP,
             "forward pass of 0.word_embeddings", shards.embedding_not_summed),
    Mutation("embedding shifted", "each rank looks up rows of its vocabulary with an offset of its rank", TP,
             "forward pass of 0.word_embeddings", shards.embedding_of_the_next_token),
    Mutation("vocabulary swapped", "ranks take the wrong slice of a weight when it is drawn", "tp2-pp0-dp1-zero2",
             "weights of tied_modules.embed.word_embeddings", shards.swapped_shards),
    Mutation("heads reversed", "a rank splits its columns into heads in the wrong order", TP,
             "2.attention.q_layernorm", shards.heads_reversed),
    Mutation("heads share keys", "gradients of keys that ranks share are not summed", "tp4-pp0-dp1",
             "5.attention", shards.heads_of_shared_keys, "grouped"),
    Mutation("loss over data group", "sums of the cross entropy are over the data-parallel ranks", TP,
             "forward pass of loss", shards.cross_entropy_over_data_group),
    Mutation("loss gradient", "the gradient of the cross entropy only counts tokens of this rank's vocabulary", TP,
             "backward pass of the loss", shards.cross_entropy_gradient),
    Mutation("norms not summed", "gradients of norms and biases are not reduced", SP, "first of 7",
             shards.replicated_not_summed),
    Mutation("norms summed twice", "gradients of norms and biases are reduced twice", SP, "first of 7",
             shards.replicated_summed_twice),
    Mutation("gathered in reverse", "shards of the sequence are gathered in another order", SP,
             "forward pass of 2.attention.query_key_value", shards.shards_gathered_in_reverse),
    Mutation("wrong shard", "the reduce-scatter gives each rank the shard of another", SP,
             "forward pass of 2.attention.dense", shards.shard_of_the_next_rank),
    Mutation("shards not summed", "the gradient of gathered shards is cut instead of reduced", SP,
             "backward pass of 8", shards.shards_of_gradients_not_summed),
    Mutation("positions not summed", "the gradient of the table of positions is not reduced", SP,
             "1.position_embeddings", shards.table_not_summed),
    Mutation("wrong position", "every rank adds the positions of the first shard", SP,
             "forward pass of 1.position_embeddings", shards.positions_of_the_first_shard),
    Mutation("chunks in order", "tokens are divided in order, attention expects zigzag", CP,
             "forward pass of 0.word_embeddings", sequences.chunks_in_order),
    Mutation("ring stops", "attention leaves out the keys of the other ranks", CP,
             "forward pass of 2.attention.core", sequences.ring_without_steps),
    Mutation("ring keeps gradients", "gradients of keys do not return to their rank", CP,
             "backward pass of 5.attention.core", sequences.ring_without_gradients),
    Mutation("wrong rotation", "every rank rotates by the first positions", CP,
             "forward pass of 2.attention.rotary", sequences.first_positions_rotated, "llama"),
    Mutation("loss weights", "the loss of a shard is not multiplied by the number of shards", CP,
             "forward pass of loss", sequences.loss_of_a_shard),
    Mutation("labels in order", "labels are divided in order, tokens in zigzag", CP, "forward pass of loss",
             sequences.labels_in_order),
    Mutation("heads swapped", "Ulysses returns the heads in another order", ULYSSES,
             "forward pass of 2.attention.core", sequences.heads_come_back_swapped),
    Mutation("sequence reversed", "Ulysses puts the parts of the sequence together in another order", ULYSSES,
             "forward pass of 2.attention.core", sequences.sequence_exchanged_in_reverse),
    Mutation("same rows", "every data-parallel rank reads the rows of the first", DP, "the batch: tokens",
             replicas.rows_of_the_first_rank),
    Mutation("accumulation", "loss weights ignore the number of micro-batches", "tp1-pp0-dp2-zero1",
             "the batch: labels and loss weights", replicas.ignored_accumulation),
    Mutation("tokens counted", "loss weights count the tokens of one rank", DP, "the batch: labels and loss weights",
             replicas.tokens_counted_on_each_rank, "masked"),
    Mutation("not averaged", "gradients are not reduced over the data-parallel ranks", DP, AVERAGE,
             replicas.gradients_not_averaged),
    Mutation("summed", "gradients are summed, not averaged", DP, AVERAGE, replicas.gradients_summed),
    Mutation("bucket summed", "buckets of ZeRO are summed, not averaged", "tp1-pp0-dp2-zero1", AVERAGE,
             replicas.bucket_not_divided),
    Mutation("bucket not reduced", "ranks keep their own part of a bucket", "tp1-pp0-dp2-zero2", AVERAGE,
             replicas.bucket_not_reduced),
    Mutation("weights not gathered", "weights are not gathered after the step", "tp1-pp0-dp2-zero1",
             "the optimizer step", replicas.weights_not_gathered),
    Mutation("gradient doubled", "the loss is doubled before the backward pass", DP, "backward pass of the loss",
             replicas.doubled_gradient),
    Mutation("learning rate", "rank 1 steps with another learning rate", "tp2-pp1-dp1", "the optimizer step",
             replicas.wrong_learning_rate),
    Mutation("norm counts twice", "the gradient norm counts replicated weights on each rank", "tp2-pp0-dp1-zero1",
             "the gradient norm", replicas.wrong_norm),
    Mutation("norm of a stage", "the gradient norm is not summed over the stages", PP, "the gradient norm",
             replicas.norm_of_a_stage),
    Mutation("tied", "the gradient of the tied embedding is not summed over the stages", PP,
             "the sum of the gradients of tied weights", replicas.untied_embedding),
    Mutation("layer left out", "a stage begins one layer too late", PP, "the layers of the stages: 4.",
             replicas.layer_left_out),
    Mutation("layer twice", "a stage repeats its first layer", PP, "the layers of the stages: 4.",
             replicas.layer_twice),
    Mutation("gradients doubled in transfer", "gradients between stages are twice as large", "tp1-pp2-dp2",
             "the transfer of its gradient", replicas.gradients_sent_twice_as_large),
    Mutation("transfer in bf16", "activations are sent in bf16", "tp1-pp4-dp1", "the transfer of the output",
             replicas.activations_sent_in_bf16),
    Mutation("forgotten", "a deferred weight gradient is never computed", "tp1-pp2-dp1-zbh1",
             "weights of 5.mlp.dense_4h_to_h", replicas.weight_gradient_forgotten),
    Mutation("router not summed", "the gradient of the router is not reduced", TP, "5.mlp.router",
             sequences.router_not_summed, "moe"),
    Mutation("balance", "each tensor-parallel rank adds the full gradient of the auxiliary loss", TP, "5.mlp.router",
             sequences.balance_counted_on_each_rank, "moe"),
    Mutation("experts not summed", "partial sums of experts are not reduced", TP, "forward pass of 2.mlp",
             sequences.experts_not_summed, "moe"),
    Mutation("input of experts", "the gradient of the input of experts is not reduced", TP, "backward pass of 5.mlp",
             sequences.gradient_of_experts_not_summed, "moe"),
    Mutation("weights of experts", "outputs of a token's experts are weighted in another order", EP,
             "forward pass of 2.mlp.router", sequences.wrong_weights_of_experts, "moe"),
    Mutation("outputs of experts", "outputs of experts are sent back in another order", EP, "forward pass of 2.mlp",
             sequences.outputs_of_experts_reversed, "moe"),
    Mutation("rows not sorted", "received tokens are not sorted by expert", EP, "forward pass of 2.mlp",
             sequences.rows_not_sorted, "moe"),
    Mutation("experts swapped", "ranks have the experts of one another", "tp1-pp1-dp2-ep2-zero1",
             "weights of 2.mlp.experts", sequences.swapped_experts, "moe"),
    Mutation("gradients of experts", "gradients of experts are doubled", "tp1-pp0-dp2-ep2-zero1",
             "gradients of the weights of 5.mlp.experts", sequences.doubled_gradient_of_experts, "moe"),
    Mutation("norm of experts", "each rank clips experts by the norm of its own", "tp1-pp0-dp2-ep2",
             "the gradients of experts", sequences.wrong_norm_of_experts, "moe"),
    Mutation("first token", "the head of BERT reads the first token of each shard", SP, "pooler",
             shards.first_token_of_each_shard, "bert"),
    Mutation("biases of other heads", "ranks have the relative positions of other heads", TP,
             "tied_modules.encoder_positions", shards.biases_of_other_heads, "t5"),
    Mutation("dropout", "tensor-parallel ranks draw different masks of replicated tensors; dropout is off", TP,
             "ResidualConnection", shards.dropout_differs),
]  # fmt: skip

HEALTHY = {
    "gpt2": "tp2-pp2-dp2-sp tp1-pp2-dp1-zbv tp1-pp2-dp1-interleaved2 tp2-pp0-dp1-cp2-sp "
    "tp1-pp0-dp2-zero2 tp1-pp0-dp2-zero3",
    "llama": "tp2-pp2-dp1-sp tp2-pp0-dp1-cp2 tp1-pp0-dp2-zero1-ulysses2",
    "grouped": "tp4-pp0-dp1 tp2-pp0-dp1-cp2-sp",
    "moe": "tp2-pp0-dp2-ep2 tp1-pp2-dp2-ep2 tp2-pp0-dp1-sp",
    "bert": "tp2-pp2-dp1-sp tp1-pp0-dp2-zero1-cp2",
    "t5": "tp2-pp2-dp1 tp1-pp0-dp2-zero1",
}
"""Layouts of each model that are tried without a fault."""
