"""What a micro-batch leaves behind for its backward pass, as this project's layers do.

b micro-batch, s sequence of this rank, h hidden, f inside the MLP, n heads, v padded vocabulary, t tensor-parallel size

It is the table of arXiv 2205.05198 with three differences: attention keeps no scores where the kernel is a
fused one, linears keep their gathered inputs under sequence parallelism, and fp32 takes four bytes an element.
"""

from typing import NamedTuple

from megatron.chunks import rows_at_once
from megatron.config import RunConfig
from megatron.planner.states import FP32, bytes_of

_INT64 = 8


class Sizes(NamedTuple):
    """The shapes and types of one rank's tensors."""

    tokens: int
    """b s, of which this rank sees its part of the sequence under Ulysses."""
    stream: int
    """Of these, those in hidden states between the layers' parallel parts."""
    h: int
    f: int
    n: int
    """Heads of this rank."""
    s: int
    """Tokens that attention sees."""
    b: int
    t: int
    v: int
    element: int
    residual: int
    """Bytes of an element of the residual stream."""
    mask: int
    """Bytes of an element of a dropout mask; 0 without dropout."""


def sizes(run: RunConfig) -> Sizes:
    """The sizes of ``run``, whose batch and vocabulary are settled."""
    model, parallel = run.model, run.parallel
    t, parts = parallel.model_parallel_size, parallel.ds_sequence_parallel_size
    tokens = run.train.micro_batch_size * run.data.seq_length // parts
    element = bytes_of(run)
    on_cpu = parallel.device == "cpu"  # where dropout's mask is one of numbers
    return Sizes(
        tokens=tokens,
        stream=tokens // t if parallel.sequence_parallel else tokens,
        h=model.hidden_size,
        f=model.ffn_hidden_size,
        n=model.num_attention_heads // (t * parts),
        s=run.data.seq_length,
        b=run.train.micro_batch_size,
        t=t,
        v=model.padded_vocab_size,
        element=element,
        residual=FP32 if model.fp32_residual_connection else element,
        mask=(element if on_cpu else 1) if model.hidden_dropout else 0,
    )


class Activations(NamedTuple):
    """Bytes of one micro-batch."""

    layer: int
    """What a transformer layer keeps where nothing is recomputed but what selective leaves out."""
    scores: int
    """What attention's core keeps, or would, beside query, key, value and context."""
    kept_input: int
    """What a group of recomputed layers keeps: its input, or a part of it, or nothing on the device."""
    front: int
    """What the embeddings keep."""
    back: int
    """What the last norm and the head keep, without the logits."""
    logits: int
    """Most that logits take at a time: themselves, their gradients, and some rows in the loss's type."""
    stored_logits: int
    """The logits themselves."""
    hidden: int
    """Hidden states between two stages."""
    passing: int
    """What the backward pass of a layer takes beside what is kept: gradients of a few of its tensors."""


def activations(run: RunConfig) -> Activations:
    """What a micro-batch of ``run`` leaves behind on one rank, part by part."""
    z = sizes(run)
    scores = _scores(run, z)
    hidden = z.stream * z.h * z.residual
    logits = z.tokens * (z.v // z.t)
    whole = z.tokens * z.h * z.element
    # Tensor parallelism adds the gradient of its region's input, and a copy to be reduced; where it cuts the
    # sequence, parts of them, too.
    copies = 2 if z.t == 1 else 4 if z.stream == z.tokens else 6
    return Activations(
        layer=_layer(z) + (0 if run.model.recomputes_attention else scores),
        scores=scores,
        kept_input=_kept_input(run, hidden, z.t),
        front=z.tokens * (_INT64 + 1) + z.stream * z.h * z.mask,
        back=hidden + whole + 2 * z.stream * FP32,
        logits=2 * logits * z.element + _loss_rows(run, z),
        stored_logits=logits * z.element,
        hidden=hidden,
        passing=2 * z.tokens * z.f * z.element // z.t + copies * whole,
    )


def _layer(z: Sizes) -> int:
    streams = 2 * z.stream * z.h * (z.residual + z.mask) + 4 * z.stream * FP32  # and mean and deviation of two norms
    linear_inputs = 2 * z.tokens * z.h * z.element  # whole under sequence parallelism, too: they have been gathered
    cut = (4 * z.h + 2 * z.f) * z.tokens * z.element // z.t  # query, key, value, context, and both sides of GELU
    return streams + linear_inputs + cut


def _loss_rows(run: RunConfig, z: Sizes) -> int:
    """The rows of logits that the loss takes together, and beside them those they are made of."""
    columns = min(run.model.vocab_size, z.v) // z.t or 1  # without those that pad the vocabulary
    element = z.element if run.model.fp16_lm_cross_entropy else FP32
    rows = min(z.tokens, rows_at_once(columns, run.parallel.device))
    return rows * columns * element * (1 if element == z.element else 2)


def _kept_input(run: RunConfig, hidden: int, t: int) -> int:
    if run.activation.checkpoint_in_cpu:
        return 0
    return hidden // (t if run.activation.partition_activations else 1)


def _scores(run: RunConfig, z: Sizes) -> int:
    """What attention's core keeps beside query, key, value and context."""
    model = run.model
    scores, queries = z.b * z.n * z.s * z.s, z.b * z.n * z.s * model.head_size
    dropout = bool(model.attention_dropout)
    on_cpu = run.parallel.device == "cpu"
    mask = (z.element if on_cpu else 1) if dropout else 0
    if model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling:
        copies = queries * (z.element if z.element == FP32 or not model.attention_softmax_in_fp32 else 2 * FP32)
        weights = z.element if dropout or z.element != FP32 else 0
        return scores * (FP32 + mask + weights) + copies
    if on_cpu and dropout:  # the fused kernel of the CPU has no dropout: torch does it step by step, in fp32
        return scores * 3 * FP32 + (2 if z.element == FP32 else 3) * queries * FP32
    return z.b * z.n * z.s * FP32
