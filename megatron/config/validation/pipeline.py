"""The rules about pipeline stages, their order and their parts; see ``Rule`` for what a check returns."""

import re

from megatron.config import RunConfig
from megatron.parallel.pipeline import partition


def pieces(run: RunConfig) -> str | None:
    """Something for each piece to hold. How an explicit list sees to that is the business of ``partition_fits``."""
    layers, parallel = run.model.num_layers, run.parallel
    method = parallel.pipeline_partition
    if layers < 1 or not parallel.uses_pipeline or _method_problem(method) or partition.explicit(method):
        return None
    # By parameters and operations the head weighs what the vocabulary does, which is not known yet.
    most = sum(map(bool, partition.shares(run))) if method.startswith(partition.BY_TYPE) else layers + 1
    if most >= parallel.model_chunks or not most:
        return None
    pieces = f"--pipe-parallel-size {parallel.pipe_stages}"
    if parallel.uses_dualpipev:
        pieces = f"the two pieces to a stage of {pieces} and --pipeline-schedule {parallel.pipeline_schedule}"
    fewer = most // (parallel.model_chunks // parallel.pipe_stages)
    remedy = f"use at most {fewer} stages" if fewer else "use --pipeline-schedule 1f1b"
    if most == layers:
        return f"--num-layers {layers} is less than {pieces}: {remedy}"
    return f"--pipeline-partition {method} has {most} parts to share, less than {pieces}: {remedy}"


def partition_fits(run: RunConfig) -> str | None:
    """Whether ``--pipeline-partition`` can be read, and cuts this model into these pieces."""
    layers, parallel = run.model.num_layers, run.parallel
    method = parallel.pipeline_partition
    said = f"--pipeline-partition {method}"
    if problem := _method_problem(method):
        return f"{said}: {problem}"
    numbers = partition.explicit(method)
    if numbers is None and layers > 0 and method.startswith(partition.BY_TYPE):
        names = partition.layer_names(run.model)
        if not any(partition.shares(run)):
            return f"{said} matches no layer: the layers are {', '.join(dict.fromkeys(names))}"
    if numbers is None or layers < 1 or not parallel.uses_pipeline:
        return None
    if len(numbers) != parallel.model_chunks:
        share = f"two for each stage of --pipeline-schedule {parallel.pipeline_schedule} and"
        each = share if parallel.uses_dualpipev else "one for each of"
        return f"{said}: give {parallel.model_chunks} numbers, {each} --pipe-parallel-size {parallel.pipe_stages}"
    if sum(numbers) != layers:
        return f"{said} comes to {sum(numbers)} layers, and --num-layers is {layers}: make them equal"
    if 0 in numbers[1:-1]:
        return f"{said} leaves a stage between others empty: only the first and the last have something without layers"
    return None


def embeddings_alone(run: RunConfig) -> str | None:
    """A first stage without layers, whose optimizer has no parameters that are spared weight decay."""
    numbers, parallel = partition.explicit(run.parallel.pipeline_partition), run.parallel
    alone = numbers is not None and len(numbers) > 1 and numbers[0] == 0
    if not alone or parallel.uses_dualpipev or (run.zero.zero_stage == 0 and run.precision.dtype == "fp32"):
        return None
    return (
        f"--pipeline-partition {parallel.pipeline_partition} leaves the embeddings alone, which works in fp32 at "
        "--zero-stage 0 only, for they have no weights without decay: give the first stage a layer"
    )


def _method_problem(method: str) -> str | None:
    """What keeps ``method`` from being one, whatever the model."""
    if method.startswith(partition.BY_TYPE):
        try:
            re.compile(method.removeprefix(partition.BY_TYPE))
        except re.error as error:
            return f"that is no regular expression ({error})"
    elif method not in partition.METHODS and partition.explicit(method) is None:
        known = ", ".join((*partition.METHODS, "type:REGEX"))
        return f"choose from {known}, or give the layers of each stage, such as 3,5,4"
    return None


def partition_needs_pipeline(run: RunConfig) -> str | None:
    """A plain engine has no stages."""
    default = type(run.parallel)().pipeline_partition
    if run.parallel.pipeline_partition != default and not run.parallel.uses_pipeline:
        return "--pipeline-partition has no effect without --pipe-parallel-size: add it, or remove the former"
    return None


def schedule_needs_pipeline(run: RunConfig) -> str | None:
    """A plain engine has no stages."""
    if run.parallel.uses_dualpipev and not run.parallel.uses_pipeline:
        return (
            f"--pipeline-schedule {run.parallel.pipeline_schedule} has no effect without --pipe-parallel-size: "
            "add it, or remove the former"
        )
    return None


def micro_batches_for_dualpipev(run: RunConfig) -> str | None:
    """As many as DeepSpeed's engine asks for."""
    parallel, gas = run.parallel, run.train.gradient_accumulation_steps
    needed = 2 * parallel.pipe_stages
    if parallel.world_size % max(parallel.model_parallel_size * parallel.pipe_stages, 1):
        return None  # the batch is not settled
    if parallel.uses_dualpipev and parallel.uses_pipeline and 0 < gas < needed:
        return (
            f"--pipeline-schedule {parallel.pipeline_schedule} with --pipe-parallel-size {parallel.pipe_stages} needs "
            f"{needed} micro-batches or more, and there are {gas}: use --gas {needed}, with a smaller --batch-size "
            "for the same global batch"
        )
    return None
