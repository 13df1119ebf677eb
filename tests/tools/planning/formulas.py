"""The formulas of the papers in plain numbers, for comparison with what the planner works out.

b micro-batch, s sequence, h hidden, a heads, layers, v vocabulary, t tensor-parallel size, p pipeline
stages, d data-parallel size. Bytes unless stated otherwise.
"""

ADAM_BYTES = 12
"""Mixed-precision Adam keeps of each parameter an fp32 copy and two moments (arXiv 1910.02054, section 3.1)."""


def parameters(layers: int, h: int, v: int, s: int) -> int:
    """Parameters of GPT-2 with tied embeddings, without padding: the sum of its matrices, biases and norms."""
    return v * h + s * h + layers * (12 * h * h + 13 * h) + 2 * h


def model_state_bytes(parameters: float, d: int, zero_stage: int, *, k: int = ADAM_BYTES) -> float:
    """16-bit weights and gradients, and ``k`` bytes of optimizer state, per rank (arXiv 1910.02054, section 5)."""
    sharded = {0: 0, 1: k, 2: 2 + k, 3: 4 + k}[zero_stage]
    return parameters * (4 + k - sharded + sharded / d)


def layer_activations(
    s: int,
    b: int,
    h: int,
    a: int,
    t: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: str | None = None,
) -> float:
    """What a layer keeps in 16-bit for the backward pass (arXiv 2205.05198, table 2)."""
    if recompute == "full":
        return 2 * s * b * h
    scores = 0.0 if recompute == "selective" else 5 * a * s / (h * t)
    whole = 10 / t if sequence_parallel else 10
    return s * b * h * (whole + 24 / t + scores)


def model_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """Operations of forward and backward pass of a global batch (arXiv 2205.05198, appendix A)."""
    return 72 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))


def full_recompute_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """The same with each layer's forward pass once more (arXiv 2104.04473, section 5.1)."""
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
