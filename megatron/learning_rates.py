"""``AnnealingLR`` under its classic path; it is defined in ``megatron.training.learning_rates``."""

from megatron.training.learning_rates import AnnealingLR

__all__ = ["AnnealingLR"]
