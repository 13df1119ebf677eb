"""Floating-point operations of GPT training."""

from megatron.config import RunConfig


def flops_per_iteration(run: RunConfig) -> float:
    """Operations of one global batch by Megatron's formula (arXiv 2104.04473, section 5.1).

    72 B s l h^2 (1 + s/6h + V/12lh); recomputed activations cost the layers' forward pass once more.
    Attention is counted in full, without the half that the causal mask would save.
    """
    m, s = run.model, run.data.seq_length
    layers = 24 * m.num_layers * m.hidden_size**2 * (1 + s / (6 * m.hidden_size))
    logits = 6 * m.hidden_size * m.padded_vocab_size
    passes = 4 if run.activation.checkpoint_activations else 3
    return run.train.global_batch_size * s * (passes * layers + logits)
