"""Floating-point operations of GPT training."""

from megatron.config import RunConfig


def flops_per_iteration(run: RunConfig) -> float:
    """Operations of one global batch by Megatron's formula (arXiv 2104.04473, section 5.1).

    72 B s l h^2 (1 + s/6h + V/12lh); recomputed layers cost their forward pass once more, and a recomputed
    attention core its part of it, s/6h. Attention is counted in full, without what causality or a window would save.
    """
    m, s = run.model, run.data.seq_length
    linears = 24 * m.num_layers * m.hidden_size**2
    attention = linears * s / (6 * m.hidden_size)
    logits = 6 * m.hidden_size * m.padded_vocab_size
    recomputed = attention if m.recomputes_attention else linears + attention if run.activation.layers_together else 0
    return run.train.global_batch_size * s * (3 * (linears + attention) + recomputed + logits)
