"""Rules about how ranks share layers and samples: sizes that divide each other, sequence and context parallelism."""

import math
from collections.abc import Callable

from megatron.cli.validation.rules import Messages, rule
from megatron.common.errors import counted, nearest_multiples
from megatron.config import RunConfig


@rule("heads divide the hidden size", why="Each attention head has an equal part of it, unless --kv-channels is given.")
def hidden_size(run: RunConfig) -> Messages:
    heads = run.model.num_attention_heads
    if run.model.kv_channels:
        return
    yield from _multiple("--hidden-size", run.model.hidden_size, f"--num-attention-heads {heads}", heads)


@rule("tensor-parallel ranks divide the heads", why="A rank computes complete attention heads.")
def heads(run: RunConfig) -> Messages:
    heads, ranks = run.model.num_attention_heads, run.parallel.model_parallel_size
    yield from _multiple("--num-attention-heads", heads, f"--model-parallel-size {ranks}", ranks)


@rule("query groups divide the heads", why="Each key and value head has an equal number of query heads.")
def query_groups(run: RunConfig) -> Messages:
    groups = run.model.query_groups
    yield from _multiple("--num-attention-heads", run.model.num_attention_heads, f"--num-query-groups {groups}", groups)


@rule(
    "query groups and tensor-parallel ranks divide one another",
    why="A rank computes complete groups, or its part of the queries of one group.",
)
def query_groups_over_ranks(run: RunConfig) -> Messages:
    groups, ranks = run.model.query_groups, run.parallel.model_parallel_size
    if groups != run.model.num_attention_heads and not (_divides(groups, ranks) or _divides(ranks, groups)):
        yield (
            f"--num-query-groups {groups} and --model-parallel-size {ranks}: neither is a multiple of the other; use "
            f"--model-parallel-size {_either([n for n in range(1, groups + 1) if groups % n == 0])}"
        )


@rule("tensor-parallel ranks divide the MLP", why="Each rank holds an equal share of its columns.")
def ffn_hidden_size(run: RunConfig) -> Messages:
    size, ranks = run.model.ffn_hidden_size, run.parallel.model_parallel_size
    yield from _multiple("--ffn-hidden-size", size, f"--model-parallel-size {ranks}", ranks)


@rule("sequence-parallel ranks divide the sequence", why="Each rank holds an equal part of the sequence.")
def sequence_length(run: RunConfig) -> Messages:
    parallel, splits = run.parallel, {}
    if parallel.context_parallel_size > 1:
        splits["--context-parallel-size"] = parallel.context_parallel_size
    if parallel.ds_sequence_parallel_size > 1:
        splits["--ds-sequence-parallel-size"] = parallel.ds_sequence_parallel_size
    if parallel.sequence_parallel:
        splits["--sequence-parallel's --model-parallel-size"] = parallel.model_parallel_size
    product = " x ".join(f"{name} {size}" for name, size in splits.items())
    yield from _multiple("--seq-length", run.data.seq_length, product, math.prod(splits.values()))


@rule(
    "context-parallel ranks have two chunks each",
    why="Rank r of N has chunks r and 2N - 1 - r of the sequence, so that causal attention is equal work for all.",
)
def chunks_of_ranks(run: RunConfig) -> Messages:
    parallel, ranks = run.parallel, run.parallel.ring_size
    if ranks == 1:
        return
    product = f"2 x --context-parallel-size {parallel.context_parallel_size}"
    if parallel.cp_comm_type == "a2a+p2p":
        product = f"2 x {ranks} ranks of a ring"
    yield from _multiple("--seq-length", run.data.seq_length, product, 2 * ranks)


@rule(
    "a2a+p2p has two sizes",
    why="Of --context-parallel-size ranks, groups of the first size exchange heads, and rings of the second size pass "
    "keys and values around.",
)
def hierarchy(run: RunConfig) -> Messages:
    parallel, sizes = run.parallel, run.parallel.hierarchical_context_parallel_sizes
    fits = len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == parallel.context_parallel_size
    if parallel.cp_comm_type == "a2a+p2p" and not fits:
        halves = f"2 {max(parallel.context_parallel_size // 2, 1)}"
        yield (
            f"--cp-comm-type a2a+p2p needs two sizes whose product is --context-parallel-size "
            f"{parallel.context_parallel_size}: use --hierarchical-context-parallel-sizes, such as {halves}"
        )


@rule(
    "Ulysses ranks divide the heads",
    why="Around attention they exchange their parts of the sequence for complete heads.",
)
def ulysses_heads(run: RunConfig) -> Messages:
    heads, parallel = run.model.num_attention_heads, run.parallel
    tensor, ranks = parallel.model_parallel_size, parallel.ulysses_size
    if ranks <= 1 or tensor < 1 or not _divides(tensor, heads):
        return
    sizes = {
        f"--context-parallel-size {parallel.context_parallel_size}": parallel.cp_comm_type == "a2a",
        f"the first of --hierarchical-context-parallel-sizes {ranks // parallel.ds_sequence_parallel_size}": (
            parallel.cp_comm_type == "a2a+p2p"
        ),
        f"--ds-sequence-parallel-size {parallel.ds_sequence_parallel_size}": parallel.ds_sequence_parallel_size > 1,
    }
    product = " x ".join(name for name, counts in sizes.items() if counts)
    if tensor > 1:
        product += f" x --model-parallel-size {tensor}"
    yield from _multiple("--num-attention-heads", heads, product, tensor * ranks)
    groups = max(run.model.query_groups // tensor, 1)
    if not (_divides(groups, ranks) or _divides(ranks, groups)):
        yield (
            f"{product} leaves {groups} query groups to {ranks} ranks: neither is a multiple of the other; use "
            f"{_either([n for n in range(1, groups + 1) if groups % n == 0])} ranks, or --cp-comm-type p2p"
        )


@rule("positions cover the sequence", why="Each token of a sample needs a learned position.")
def positions(run: RunConfig) -> Messages:
    tokens, positions = run.data.seq_length, run.model.max_position_embeddings
    if tokens > positions > 0:
        yield (
            f"--seq-length {tokens} is more than --max-position-embeddings {positions}: raise "
            "--max-position-embeddings, or lower --seq-length"
        )


@rule(
    "processes = TP x PP x CP x SP x DP",
    why="The processes form a whole number of model replicas.",
    otherwise="AssertionError: Invalid Grid",
)
def world_size(run: RunConfig) -> Messages:
    world, tensor, stages = run.parallel.world_size, run.parallel.model_parallel_size, run.parallel.pipe_stages
    ulysses, replica = run.parallel.ds_sequence_parallel_size, run.parallel.replica_size
    context, shared = run.parallel.context_parallel_size, run.parallel.sequence_ranks
    if replica < 1 or world % replica == 0:
        return
    below = world // replica * replica
    remedies = [f"{below} or {below + replica} processes" if below else counted(replica, "process")]
    heads = run.model.num_attention_heads

    def remedy(flag: str, others: int, fits: Callable[[int], bool]) -> None:
        sizes = [n for n in range(1, world + 1) if world % (n * others) == 0 and fits(n)]
        if sizes:
            remedies.append(f"{flag} {_either(sizes)}")

    in_heads = run.parallel.ulysses_size
    remedy("--model-parallel-size", stages * shared, lambda n: _divides(n * in_heads, heads))
    grid = f"--model-parallel-size {tensor}"
    if run.parallel.uses_pipeline:
        grid += f" x --pipe-parallel-size {stages}"
        remedy("--pipe-parallel-size", tensor * shared, lambda n: n <= run.model.num_layers)
    if context > 1:
        grid += f" x --context-parallel-size {context}"
        length = run.data.seq_length
        remedy("--context-parallel-size", tensor * stages * ulysses, lambda n: _divides(2 * n * ulysses, length))
    if ulysses > 1:
        grid += f" x --ds-sequence-parallel-size {ulysses}"
        remedy("--ds-sequence-parallel-size", tensor * stages * context, lambda n: _divides(n * tensor, heads))
    yield f"{counted(world, 'process')} cannot be split into {grid}: use {', or '.join(remedies)}"


def _multiple(name: str, number: int, factors: str, factor: int) -> Messages:
    """A message unless ``number`` is a multiple of ``factor``, which ``factors`` spells out as flags."""
    if not _divides(factor, number):
        yield f"{name} {number} is not a multiple of {factors}: use {nearest_multiples(number, factor)}"


def _divides(small: int, large: int) -> bool:
    """Whether ``small`` divides ``large``; also true if either is out of range, which is reported elsewhere."""
    return small < 1 or large < 1 or large % small == 0


def _either(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
