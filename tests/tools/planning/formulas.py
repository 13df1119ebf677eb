"""The formulas of the papers in plain numbers, for comparison with what the planner works out.

b micro-batch, s sequence, h hidden, a heads, layers, v vocabulary, t tensor-parallel size, p pipeline
stages, d data-parallel size. Bytes unless stated otherwise.
"""

ADAM_BYTES = 12
"""Mixed-precision Adam keeps of each parameter an fp32 copy and two moments (arXiv 1910.02054, section 3.1)."""


def parameters(layers: int, h: int, v: int, s: int) -> int:
    """Parameters of GPT-2 with tied embeddings, without padding: the sum of its matrices, biases and norms."""
    return v * h + s * h + layers * (12 * h * h + 13 * h) + 2 * h


def approximate_parameters(layers: int, h: int, v: int, s: int) -> float:
    """The same as the tables of papers count it (arXiv 2104.04473, section 5.1)."""
    return 12 * layers * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))


def model_state_bytes(parameters: float, d: int, zero_stage: int, *, k: int = ADAM_BYTES) -> float:
    """16-bit weights and gradients, and ``k`` bytes of optimizer state, per rank (arXiv 1910.02054, section 5)."""
    sharded = {0: 0, 1: k, 2: 2 + k, 3: 4 + k}[zero_stage]
    return parameters * (4 + k - sharded + sharded / d)


def interleaving_factor(p: int, v: int) -> float:
    """By how much ``v`` pieces to a stage raise the activations of the first one (arXiv 2205.05198, section 4.2.3)."""
    return 1 + (p - 1) / (p * v)


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


def end_activations(s: int, b: int, h: int, v: int, p: int, t: int) -> float:
    """What the two ends keep beside the layers, on the first of ``p`` stages (arXiv 2205.05198, section 4.3)."""
    dropout = s * b * h * p / t
    return dropout + (4 * s * b * h / t * (1 + v / h) if p == 1 else 0)


def model_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """Operations of forward and backward pass of a global batch (arXiv 2205.05198, appendix A)."""
    return 72 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))


def full_recompute_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """The same with each layer's forward pass once more (arXiv 2104.04473, section 5.1)."""
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))


def selective_recompute_flops(batch: int, s: int, layers: int, h: int, v: int) -> float:
    """The same with attention's core once more, as appendix A of arXiv 2205.05198 counts it: as its backward, too."""
    return 72 * batch * s * layers * h * h * (1 + s / (3 * h) + v / (12 * layers * h))


def training_days(tokens: float, flops_per_token: float, devices: int, flops_per_device: float) -> float:
    """Days for so many tokens at a rate of operations a second."""
    return tokens * flops_per_token / (devices * flops_per_device) / 86400


def approximate_days(tokens: float, parameters: float, devices: int, flops_per_device: float) -> float:
    """The same from the parameters alone, with full recomputation (arXiv 2104.04473, section 5.1)."""
    return training_days(tokens, 8 * parameters, devices, flops_per_device)


def most_loaded_shard(layers: int, h: int, v: int, t: int, p: int) -> float:
    """Weights of the first of ``p`` stages as Megatron's memory report counts them: matrices, words and norms."""
    norms = (2 * layers + 1) * 2 * h
    return 12 * h * h * layers / (p * t) + norms / p + v * h / t


def zero_activations(s: int, b: int, h: int, layers: int) -> float:
    """What all layers keep in 16-bit by the rule of thumb of arXiv 1910.02054, section 3.2."""
    return 2 * 12 * h * b * s * layers
