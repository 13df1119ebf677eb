"""Formulas of the papers in plain numbers: micro-batch, sequence s, hidden size h, layers, vocabulary v."""


def model_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """Operations of forward and backward pass of a global batch (arXiv 2205.05198, appendix A)."""
    return 72 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))


def full_recompute_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """The same with each layer's forward pass once more (arXiv 2104.04473, section 5.1)."""
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
