"""Tensor parallelism: Megatron's layers and the communication between their ranks."""
