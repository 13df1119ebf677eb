"""Parallelism along the sequence: Megatron's sequence parallelism and DeepSpeed-Ulysses."""
