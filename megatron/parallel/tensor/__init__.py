"""Tensor parallelism: Megatron's sharded layers and their communication."""
