"""Megatron-LM's classic path of ``AnnealingLR``."""

from megatron.training.learning_rates import AnnealingLR

__all__ = ["AnnealingLR"]
