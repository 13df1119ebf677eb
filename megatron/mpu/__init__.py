"""Tensor parallelism: the layout of ranks and the layers that are cut across it. Knows nothing of GPT-2."""

from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.tensor.data import broadcast_data
from megatron.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightInit,
    sum_gradient,
)
from megatron.parallel.tensor.mappings import (
    copy_to_model_parallel_region,
    exchange_parts,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed, random_stream

__all__ = [
    "ColumnParallelLinear",
    "ParallelLayout",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "WeightInit",
    "broadcast_data",
    "copy_to_model_parallel_region",
    "exchange_parts",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "get_rng_tracker",
    "model_parallel_manual_seed",
    "random_stream",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "sum_gradient",
    "vocab_parallel_cross_entropy",
]
