"""apex's fused layer norms and Adam in plain torch, for tests."""

from apex import normalization, optimizers  # noqa: F401, as in apex itself: DeepSpeed looks for apex.optimizers
