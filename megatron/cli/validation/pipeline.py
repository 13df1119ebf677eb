"""Rules about pipeline stages: the partition of the layers, and what each schedule needs."""

import re

from megatron.cli.validation.rules import Messages, rule
from megatron.common.errors import counted, nearest_multiples
from megatron.config import ParallelConfig, RunConfig
from megatron.model import partition
from megatron.parallel.pipeline.schedule import chunks_of


@rule("each stage has a layer", why="A stage without layers would only pass tensors on.")
def stages_have_layers(run: RunConfig) -> Messages:
    """Enough layers for all model chunks. Explicit partitions are checked by ``partition_fits``."""
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
        chunks = f"the {_chunks_per_stage(parallel)} model chunks per stage of {chunks} and {schedule}"
    fewer = most // parallel.chunks_per_stage
    remedy = f"use at most {counted(fewer, 'stage')}" if fewer else "use --pipeline-schedule 1f1b"
    if most == layers:
        yield f"--num-layers {layers} is less than {chunks}: {remedy}"
    else:
        yield f"--pipeline-partition {method} has {most} parts to distribute, less than {chunks}: {remedy}"


@rule(
    "the partition fits the model",
    why="Each stage has a part of the model, and all parts together are the full model.",
)
def partition_fits(run: RunConfig) -> Messages:
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
        each = f"{_chunks_per_stage(parallel)} for each stage of"
        if parallel.chunks_per_stage > 1:
            each += f" --pipeline-schedule {parallel.pipeline_schedule} and"
        yield f"{flag}: give {parallel.model_chunks} numbers, {each} --pipe-parallel-size {parallel.pipe_stages}"
    if sum(numbers) != layers:
        yield f"{flag} totals {sum(numbers)} layers, and --num-layers is {layers}: make them equal"
    if 0 in numbers[1:-1]:
        yield f"{flag} leaves a middle stage empty: only the first and the last may have no transformer layers"


def _chunks_per_stage(parallel: ParallelConfig) -> str:
    number = parallel.chunks_per_stage
    return {1: "one", 2: "two", 3: "three"}.get(number, str(number))


def _method_problem(method: str) -> str | None:
    """What is wrong with the text of a partition method, independently of the model."""
    if method.startswith(partition.BY_TYPE):
        try:
            re.compile(method.removeprefix(partition.BY_TYPE))
        except re.error as error:
            return f"that is no regular expression ({error})"
    elif method not in partition.METHODS and partition.explicit(method) is None:
        known = ", ".join((*partition.METHODS, "type:REGEX"))
        return f"choose from {known}, or give the number of layers of each stage, such as 3,5,4"
    return None


@rule(
    "a first stage without layers needs fp32 and ZeRO 0",
    why="DeepSpeed all-reduces the gradient norm once per parameter group and drops empty groups. The embeddings have "
    "no parameters without weight decay, so that their stage has fewer groups than the others.",
    otherwise="hangs in an all-reduce",
)
def embeddings_alone(run: RunConfig) -> Messages:
    numbers, parallel = partition.explicit(run.parallel.pipeline_partition), run.parallel
    has_no_layer = numbers is not None and len(numbers) > 1 and numbers[0] == 0
    if (
        not has_no_layer
        or parallel.chunks_per_stage > 1
        or (run.zero.zero_stage == 0 and run.precision.dtype == "fp32")
    ):
        return
    yield (
        f"--pipeline-partition {parallel.pipeline_partition} leaves the first stage with the embeddings only, which "
        "works in fp32 at --zero-stage 0 only: give the first stage a layer"
    )


@rule(
    "every stage has an adapter",
    why="With --lora-rank a stage without transformer layers has nothing to train, and DeepSpeed's optimizers need a "
    "parameter. By parameters and FLOPs the stages depend on the vocabulary, which is not read yet.",
    otherwise="fails on the empty list of parameters",
)
def stages_have_adapters(run: RunConfig) -> Messages:
    parallel, method = run.parallel, run.parallel.pipeline_partition
    if not (run.model.lora_rank and parallel.uses_pipeline) or run.model.num_layers < 1:
        return
    if any(stages_have_layers(run)) or any(partition_fits(run)):
        return
    if method not in ("parameters", "flops"):
        layers, schedule, stages = partition.layers_per_chunk(run), parallel.pipeline_schedule, parallel.pipe_stages
        chunks_by_stage = [chunks_of(schedule, stage, stages, parallel.chunks_per_stage) for stage in range(stages)]
        if all(any(layers[chunk] for chunk in chunks) for chunks in chunks_by_stage):
            return
    yield (
        f"--pipeline-partition {method} may leave a stage without a transformer layer, and so without an adapter of "
        "--lora-rank: remove it, or give the number of layers of each stage"
    )


@rule(
    "the interleaved schedule has a multiple of its stages as micro-batches",
    why="Micro-batches pass through the model chunks of a stage in rounds of as many as there are stages.",
)
def micro_batches_in_rounds(run: RunConfig) -> Messages:
    parallel, train = run.parallel, run.train
    if parallel.pipeline_schedule != "interleaved" or not parallel.uses_pipeline:
        return
    sizes = [size for _, size in train.batch_steps] or [train.global_batch_size]
    for size in sizes:
        number = train.gradient_accumulation_steps * size // max(train.global_batch_size, 1)
        if number % parallel.pipe_stages:
            yield (
                f"--pipeline-schedule interleaved with --pipe-parallel-size {parallel.pipe_stages} needs a multiple of "
                f"{parallel.pipe_stages} micro-batches, and there are {number}: use --gas "
                f"{nearest_multiples(number, parallel.pipe_stages)}"
            )


@rule(
    "DualPipeV has two micro-batches per stage",
    why="Each stage works on both of its model chunks at a time, which takes enough micro-batches to fill them.",
)
def micro_batches_for_dualpipev(run: RunConfig) -> Messages:
    parallel, gas = run.parallel, run.train.gradient_accumulation_steps
    if smallest := min((size for _, size in run.train.batch_steps), default=0):
        gas = gas * smallest // run.train.global_batch_size
    needed = 2 * parallel.pipe_stages
    if parallel.world_size % max(parallel.replica_size, 1):
        return  # the batch sizes are unknown
    if parallel.pipeline_schedule == "dualpipev" and parallel.uses_pipeline and 0 < gas < needed:
        yield (
            f"--pipeline-schedule {parallel.pipeline_schedule} with --pipe-parallel-size {parallel.pipe_stages} needs "
            f"{needed} micro-batches or more, and there are {gas}: use --gas {needed}, with a smaller --batch-size "
            "for the same global batch"
        )
