"""Rules about the parallel layout: sizes that must divide each other, sequence splits, pipeline stages."""

import math
import re
from collections.abc import Callable

from megatron.cli.validation.rules import Messages, divides, multiple, rule
from megatron.common.errors import counted, nearest_multiples
from megatron.config import RunConfig
from megatron.model import partition
from megatron.model.spec import LayerSpec


@rule(of_transformers=True)
def hidden_size(run: RunConfig) -> Messages:
    """Heads divide the hidden size. Each attention head has an equal part of it, unless --kv-channels is given."""
    heads = run.model.num_attention_heads
    if not run.model.kv_channels:
        yield from multiple("--hidden-size", run.model.hidden_size, f"--num-attention-heads {heads}", heads)


@rule(of_transformers=True)
def query_groups_over_ranks(run: RunConfig) -> Messages:
    """Query groups and tensor-parallel ranks divide one another.

    A rank computes complete groups, or an equal part of the queries, keys and values of one group.
    """
    groups, ranks = run.model.query_groups, run.parallel.model_parallel_size
    if groups != run.model.num_attention_heads and ranks > 0 and not run.model.can_share_heads(ranks):
        yield (
            f"--num-query-groups {groups} and --model-parallel-size {ranks}: the ranks cannot share the groups; use "
            f"--model-parallel-size {_either([n for n in range(1, groups + 1) if groups % n == 0])}"
        )


@rule()
def sequence_length(run: RunConfig) -> Messages:
    """Sequence-parallel ranks divide the sequence. Each rank holds an equal part of the sequence."""
    parallel, splits = run.parallel, {}
    if parallel.context_parallel_size > 1:
        splits["--context-parallel-size"] = parallel.context_parallel_size
    if parallel.ds_sequence_parallel_size > 1:
        splits["--ds-sequence-parallel-size"] = parallel.ds_sequence_parallel_size
    if parallel.sequence_parallel:
        splits["--sequence-parallel's --model-parallel-size"] = parallel.model_parallel_size
    product = " x ".join(f"{name} {size}" for name, size in splits.items())
    yield from multiple("--seq-length", run.data.seq_length, product, math.prod(splits.values()))


@rule()
def chunks_of_ranks(run: RunConfig) -> Messages:
    """Context-parallel ranks have two chunks each.

    Rank r of N has chunks r and 2N - 1 - r of the sequence, so that causal attention is equal work for all.
    """
    parallel, ranks = run.parallel, run.parallel.ring_size
    product = f"2 x --context-parallel-size {parallel.context_parallel_size}"
    if parallel.cp_comm_type == "a2a+p2p":
        product = f"2 x {ranks} ranks of a ring"
    if ranks > 1:
        yield from multiple("--seq-length", run.data.seq_length, product, 2 * ranks)


@rule()
def hierarchy(run: RunConfig) -> Messages:
    """a2a+p2p has two sizes.

    Of --context-parallel-size ranks, groups of the first size exchange heads, and rings of the second size pass
    keys and values around.
    """
    parallel, sizes = run.parallel, run.parallel.hierarchical_context_parallel_sizes
    fits = len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == parallel.context_parallel_size
    if parallel.cp_comm_type == "a2a+p2p" and not fits:
        halves = f"2 {max(parallel.context_parallel_size // 2, 1)}"
        yield (
            f"--cp-comm-type a2a+p2p needs two sizes whose product is --context-parallel-size "
            f"{parallel.context_parallel_size}: use --hierarchical-context-parallel-sizes, such as {halves}"
        )


@rule(of_transformers=True)
def ulysses_heads(run: RunConfig) -> Messages:
    """Ulysses ranks divide the heads. Around attention they exchange their parts of the sequence for complete heads."""
    heads, parallel = run.model.num_attention_heads, run.parallel
    tensor, ranks = parallel.model_parallel_size, parallel.ulysses_size
    if ranks <= 1 or tensor < 1 or not divides(tensor, heads):
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
    yield from multiple("--num-attention-heads", heads, product, tensor * ranks)
    groups = max(run.model.query_groups // tensor, 1)
    if not (divides(groups, ranks) or divides(ranks, groups)):
        yield (
            f"{product} leaves {groups} query groups to {ranks} ranks: neither is a multiple of the other; use "
            f"{_either([n for n in range(1, groups + 1) if groups % n == 0])} ranks, or --cp-comm-type p2p"
        )


@rule(of_transformers=True)
def positions(run: RunConfig) -> Messages:
    """Positions cover the sequence. Each token of a sample needs a learned position."""
    positions = run.model.max_position_embeddings
    has_table = run.model.has_position_table
    lengths = {"--seq-length": run.data.seq_length, "--decoder-seq-length": has_table * run.data.decoder_seq_length}
    for flag, tokens in lengths.items():
        if tokens > positions > 0:
            yield f"{flag} {tokens} is more than --max-position-embeddings {positions}: lower it or raise the other"


@rule(otherwise="AssertionError: Invalid Grid")
def world_size(run: RunConfig) -> Messages:
    """processes = TP x PP x CP x SP x DP. The processes form a whole number of model replicas."""
    parallel, heads, length = run.parallel, run.model.num_attention_heads, run.data.seq_length
    world, replica, tensor = parallel.world_size, parallel.replica_size, parallel.model_parallel_size
    ulysses = parallel.ds_sequence_parallel_size
    if replica < 1 or world % replica == 0:
        return
    below = world // replica * replica
    remedies = [f"{below} or {below + replica} processes" if below else counted(replica, "process")]
    fits: dict[str, Callable[[int], bool]] = {
        "--model-parallel-size": lambda n: divides(n * parallel.ulysses_size, heads),
        "--pipe-parallel-size": lambda n: n <= run.model.num_layers,
        "--context-parallel-size": lambda n: divides(2 * n * ulysses, length),
        "--ds-sequence-parallel-size": lambda n: divides(n * tensor, heads),
    }
    sizes = (tensor, parallel.pipe_parallel_size, parallel.context_parallel_size, ulysses)
    grid = {flag: size for flag, size, shown in zip(fits, sizes, (1, 1, 2, 2), strict=True) if size >= shown}
    for flag, size in grid.items():
        others = replica // size
        if better := [n for n in range(1, world + 1) if world % (n * others) == 0 and fits[flag](n)]:
            remedies.append(f"{flag} {_either(better)}")
    product = " x ".join(f"{flag} {size}" for flag, size in grid.items())
    yield f"{counted(world, 'process')} cannot be split into {product}: use {', or '.join(remedies)}"


def _either(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last


@rule()
def stages_have_layers(run: RunConfig) -> Messages:
    """Each stage has a layer. A stage without layers would only pass tensors on."""
    # Enough layers for all model chunks. Explicit partitions are checked by partition_fits.
    layers, parallel = run.model.num_layers, run.parallel
    method = parallel.pipeline_partition
    if layers < 1 or not parallel.uses_pipeline or _method_problem(method) or partition.explicit(method):
        return
    # By parameters and FLOPs the head weighs as much as the vocabulary size implies, which is not known yet.
    most = sum(map(bool, partition.run_weights(run))) if method.startswith(partition.BY_TYPE) else layers + 1
    if most >= parallel.model_chunks or not most:
        return
    chunks = f"--pipe-parallel-size {parallel.pipe_stages}"
    if parallel.chunks_per_stage > 1:
        schedule = f"--pipeline-schedule {parallel.pipeline_schedule}"
        chunks = f"the {parallel.chunks_per_stage} model chunks per stage of {chunks} and {schedule}"
    fewer = most // parallel.chunks_per_stage
    remedy = f"use at most {counted(fewer, 'stage')}" if fewer else "use --pipeline-schedule 1f1b"
    if most == layers:
        yield f"--num-layers {layers} is less than {chunks}: {remedy}"
    else:
        yield f"--pipeline-partition {method} has {most} parts to distribute, less than {chunks}: {remedy}"


@rule()
def partition_fits(run: RunConfig) -> Messages:
    """The partition fits the model. Each stage has a part of the model, and all parts together are the full model."""
    layers, parallel = run.model.num_layers, run.parallel
    method = parallel.pipeline_partition
    flag = f"--pipeline-partition {method}"
    if problem := _method_problem(method):
        yield f"{flag}: {problem}"
        return
    numbers = partition.explicit(method)
    if numbers is None and layers > 0 and method.startswith(partition.BY_TYPE):
        if not any(partition.run_weights(run)):
            yield f"{flag} matches no layer: the layers are {', '.join(partition.layer_names(run.model))}"
    if numbers is None or layers < 1 or not parallel.uses_pipeline:
        return
    if len(numbers) != parallel.model_chunks:
        each = f"{parallel.chunks_per_stage} for each stage of"
        if parallel.chunks_per_stage > 1:
            each += f" --pipeline-schedule {parallel.pipeline_schedule} and"
        yield f"{flag}: give {parallel.model_chunks} numbers, {each} --pipe-parallel-size {parallel.pipe_stages}"
    if sum(numbers) != layers:
        yield f"{flag} totals {sum(numbers)} layers, and --num-layers is {layers}: make them equal"
    if 0 in numbers[1:-1]:
        yield f"{flag} leaves a middle stage empty: only the first and the last may have no transformer layers"


def _method_problem(method: str) -> str | None:
    """What is wrong with the text of a partition method, regardless of the model."""
    if method.startswith(partition.BY_TYPE):
        try:
            re.compile(method.removeprefix(partition.BY_TYPE))
        except re.error as error:
            return f"not a regular expression ({error})"
        if re.search(r"\)[*+{]", method):
            return "a group that is repeated may take forever to match: list the names of classes, such as type:A|B"
    elif method not in partition.METHODS and partition.explicit(method) is None:
        known = ", ".join((*partition.METHODS, "type:REGEX"))
        return f"choose from {known}, or give the number of layers of each stage, such as 3,5,4"
    return None


def stages_without(run: RunConfig, predicate: Callable[[LayerSpec], bool], *, first_chunk: bool = False) -> Messages:
    """The beginning of a message for each pipeline stage without a layer that meets ``predicate``.

    ``first_chunk`` also checks the first model chunk of the first stage.
    """
    method = run.parallel.pipeline_partition
    if not run.parallel.uses_pipeline or run.model.num_layers < 1 or any(stages_have_layers(run)):
        return
    if any(partition_fits(run)):
        return
    if method in ("parameters", "flops"):  # these methods depend on the vocabulary size, which is not known yet
        yield f"--pipeline-partition {method} may leave a stage"
        return
    stages = partition.plan(run)
    parts = {"the first model chunk": stages[0].layers_of_chunks[0]} if first_chunk else {}
    for name, layers in (parts | {f"stage {number}": stage.layers for number, stage in enumerate(stages)}).items():
        if not any(map(predicate, layers)):
            yield f"--pipeline-partition {method} leaves {name}"


@rule(otherwise="hangs in an all-reduce")
def embeddings_only(run: RunConfig) -> Messages:
    """A first stage without layers needs fp32 and ZeRO 0.

    DeepSpeed all-reduces the gradient norm once per parameter group and drops empty groups. A stage with only the
    embeddings has no group without weight decay, and so takes part in fewer all-reduces than the other stages.
    """
    numbers, parallel = partition.explicit(run.parallel.pipeline_partition), run.parallel
    has_no_layer = numbers is not None and len(numbers) > 1 and numbers[0] == 0
    works = run.zero.zero_stage == 0 and run.precision.dtype == "fp32"
    if not has_no_layer or parallel.chunks_per_stage > 1 or works:
        return
    yield (
        f"--pipeline-partition {parallel.pipeline_partition} leaves the first stage with the embeddings only, which "
        "works in fp32 at --zero-stage 0 only: give the first stage a layer"
    )


@rule()
def micro_batches(run: RunConfig) -> Messages:
    """The schedules with model chunks have enough micro-batches.

    The interleaved schedule runs the chunks of a stage in rounds of one micro-batch per stage. DualPipeV works on
    both chunks of a stage at the same time, and needs two micro-batches per stage to fill them.
    """
    parallel, train = run.parallel, run.train
    stages, schedule = parallel.pipe_stages, parallel.pipeline_schedule
    if not parallel.uses_pipeline or train.global_batch_size < 1 or parallel.world_size % max(parallel.replica_size, 1):
        return  # the batch sizes are unknown
    flags = f"--pipeline-schedule {schedule} with --pipe-parallel-size {stages} needs"
    for _, size in train.batches.steps:
        number = train.gradient_accumulation_steps * size // train.global_batch_size
        if schedule == "interleaved" and number % stages:
            yield (
                f"{flags} a multiple of {stages} micro-batches, and there are {number}: use --gas "
                f"{nearest_multiples(number, stages)}"
            )
        elif schedule == "dualpipev" and 0 < number < 2 * stages:
            yield (
                f"{flags} {2 * stages} micro-batches or more, and there are {number}: use --gas {2 * stages}, with a "
                "smaller --batch-size for the same global batch"
            )
