"""The rules about sizes that divide each other; see ``Rule`` for what a check returns."""

import math

from megatron.config import RunConfig


def hidden_size(run: RunConfig) -> str | None:
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if not _divides(heads, hidden):
        return f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: {_nearest(hidden, heads)}"
    return None


def heads(run: RunConfig) -> str | None:
    heads, ranks = run.model.num_attention_heads, run.parallel.model_parallel_size
    if not _divides(ranks, heads):
        return (
            f"--num-attention-heads {heads} is not a multiple of --model-parallel-size {ranks}: "
            f"{_nearest(heads, ranks)}"
        )
    return None


def ffn_hidden_size(run: RunConfig) -> str | None:
    size, ranks = run.model.ffn_hidden_size, run.parallel.model_parallel_size
    if not _divides(ranks, size):
        return f"--ffn-hidden-size {size} is not a multiple of --model-parallel-size {ranks}: {_nearest(size, ranks)}"
    return None


def sequence_parallel(run: RunConfig) -> str | None:
    if run.parallel.sequence_parallel and run.parallel.model_parallel_size == 1:
        return "--sequence-parallel has no effect with --model-parallel-size 1: use 2 or more, or remove it"
    return None


def sequence_length(run: RunConfig) -> str | None:
    tokens, parallel, cuts = run.data.seq_length, run.parallel, []
    if parallel.ds_sequence_parallel_size > 1:
        cuts.append(("--ds-sequence-parallel-size", parallel.ds_sequence_parallel_size))
    if parallel.sequence_parallel:
        cuts.append(("--sequence-parallel's --model-parallel-size", parallel.model_parallel_size))
    parts = math.prod(size for _, size in cuts)
    if not _divides(parts, tokens):
        product = " x ".join(f"{name} {size}" for name, size in cuts)
        return f"--seq-length {tokens} is not a multiple of {product}: {_nearest(tokens, parts)}"
    return None


def sequence_heads(run: RunConfig) -> str | None:
    heads, tensor, ranks = (
        run.model.num_attention_heads,
        run.parallel.model_parallel_size,
        run.parallel.ds_sequence_parallel_size,
    )
    if ranks > 1 and tensor >= 1 and _divides(tensor, heads) and not _divides(tensor * ranks, heads):
        product = f"--ds-sequence-parallel-size {ranks}"
        if tensor > 1:
            product += f" x --model-parallel-size {tensor}"
        return f"--num-attention-heads {heads} is not a multiple of {product}: {_nearest(heads, tensor * ranks)}"
    return None


def ulysses_with_pipeline(run: RunConfig) -> str | None:
    if run.parallel.ds_sequence_parallel_size > 1 and run.parallel.uses_pipeline:
        return (
            f"--ds-sequence-parallel-size {run.parallel.ds_sequence_parallel_size} cannot go with "
            f"--pipe-parallel-size {run.parallel.pipe_parallel_size}: DeepSpeed's pipeline has no axis for it; use "
            "--pipe-parallel-size 0, or --sequence-parallel with --model-parallel-size"
        )
    return None


def positions(run: RunConfig) -> str | None:
    tokens, positions = run.data.seq_length, run.model.max_position_embeddings
    if tokens > positions > 0:
        return f"--seq-length {tokens} is more than --max-position-embeddings {positions}: raise the latter"
    return None


def world_size(run: RunConfig) -> str | None:
    world, tensor, stages = run.parallel.world_size, run.parallel.model_parallel_size, run.parallel.pipe_stages
    parts, replica = run.parallel.ds_sequence_parallel_size, run.parallel.replica_size
    if replica < 1 or world % replica == 0:
        return None
    below = world // replica * replica
    remedies = [f"{below} or {below + replica} processes" if below else f"{replica} processes"]
    heads = run.model.num_attention_heads
    sizes = [n for n in range(1, world + 1) if world % (n * stages * parts) == 0 and _divides(n * parts, heads)]
    if sizes:
        remedies.append(f"--model-parallel-size {_either(sizes)}")
    grid = f"--model-parallel-size {tensor}"
    if run.parallel.uses_pipeline:
        grid += f" x --pipe-parallel-size {stages}"
        depths = [n for n in range(1, world + 1) if world % (n * tensor * parts) == 0 and n <= run.model.num_layers]
        if depths:
            remedies.append(f"--pipe-parallel-size {_either(depths)}")
    if parts > 1:
        grid += f" x --ds-sequence-parallel-size {parts}"
        shares = [n for n in range(1, world + 1) if world % (n * tensor * stages) == 0 and _divides(n * tensor, heads)]
        if shares:
            remedies.append(f"--ds-sequence-parallel-size {_either(shares)}")
    unit = "process" if world == 1 else "processes"
    return f"{world} {unit} cannot be split into {grid}: use {', or '.join(remedies)}"


def _divides(small: int, large: int) -> bool:
    """Whether ``small`` divides ``large``; also if either is no size at all, which is another rule's business."""
    return small < 1 or large < 1 or large % small == 0


def _nearest(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"use {below} or {below + factor}" if below else f"use {factor}"


def _either(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
