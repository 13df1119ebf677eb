"""From what was given to a whole run: what was left open follows from the rest and from the environment."""

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import NamedTuple

from megatron.config import (
    ActivationConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
    sections,
)
from megatron.config.environment import expected_device, local_rank, world_size
from megatron.config.errors import ConfigError
from megatron.config.fields import Provided
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.parallel.pipeline.partition import repartitioned

GLOBAL, MICRO, ACCUMULATION = "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """Samples of an iteration, and how they are taken."""

    global_size: int
    micro_size: int
    accumulation: int


def solve_batch(given: Mapping[str, Provided], data_parallel_size: int) -> Batch:
    """The three batch sizes from those that were given; with one alone nothing is accumulated.

    Raises:
        ConfigError: neither a micro nor a global size was given, or they do not fit together.
    """
    sizes = {name: given[name].value for name in (GLOBAL, MICRO, ACCUMULATION) if name in given}
    if GLOBAL not in sizes and MICRO not in sizes:
        raise ConfigError("--batch-size is required (or --global-batch-size, or their keys in --deepspeed_config)")
    if min(sizes.values()) < 1:
        raise ConfigError([])  # reported already, as a value out of range
    if GLOBAL not in sizes:
        accumulation = sizes.get(ACCUMULATION, 1)
        return Batch(sizes[MICRO] * accumulation * data_parallel_size, sizes[MICRO], accumulation)
    if len(sizes) == 3:
        return _checked(given, data_parallel_size)
    known = MICRO if MICRO in sizes else ACCUMULATION
    factor = sizes.get(known, 1) * data_parallel_size
    if sizes[GLOBAL] % factor:
        other = f"{given[known].source} x " if known in given else ""
        raise ConfigError(
            f"{given[GLOBAL].source} is not a multiple of {other}data-parallel size {data_parallel_size} = {factor}: "
            f"set a global batch of {_neighbours(sizes[GLOBAL], factor)}"
        )
    rest = sizes[GLOBAL] // factor
    return Batch(sizes[GLOBAL], *((sizes[MICRO], rest) if known == MICRO else (rest, sizes.get(ACCUMULATION, 1))))


def _checked(given: Mapping[str, Provided], data_parallel_size: int) -> Batch:
    batch = Batch(*(given[name].value for name in (GLOBAL, MICRO, ACCUMULATION)))
    product = batch.micro_size * batch.accumulation * data_parallel_size
    if batch.global_size == product:
        return batch
    remedy = f"set a global batch of {product}"
    if batch.global_size % (batch.micro_size * data_parallel_size) == 0:
        remedy += f" or an accumulation of {batch.global_size // (batch.micro_size * data_parallel_size)}"
    raise ConfigError(
        f"{given[GLOBAL].source} is not {given[MICRO].source} x {given[ACCUMULATION].source} x "
        f"data-parallel size {data_parallel_size} = {product}: {remedy}"
    )


def _neighbours(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
METRICS = "metrics.jsonl"
"""What the metrics file is called in --run-dir."""


def resolve_run(
    given: Mapping[str, Provided], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2
) -> tuple[RunConfig, list[str]]:
    """The run with every field in its final value, and a message for each that has none.

    The sizes that padding and the tokenizer decide, and the DeepSpeed config, come later.
    """
    problems: list[str] = []
    run = _build(given)
    try:
        run = replace(run, parallel=_parallel(run, given, environ))
    except ConfigError as error:
        problems += error.messages
    run = replace(run, activation=_activation(run), logging=_logging(run))
    run = replace(run, model=_model(run, architecture), zero=_zero(run, given))
    run = replace(run, observe=replace(run.observe, profile_dir=run.observe.profile_dir or run.observe.trace))
    try:
        run = replace(run, parallel=_repartitioned(run, given))
    except ConfigError as error:
        problems += error.messages
    # The batch can be judged only where the processes fall into whole replicas.
    replica = run.parallel.replica_size
    if not problems and replica >= 1 and run.parallel.world_size % replica == 0:
        try:
            run = replace(run, train=_train(run, given))
        except ConfigError as error:
            problems += error.messages
    return run, problems


def _build(given: Mapping[str, Provided]) -> RunConfig:
    parts = {
        name: section(**{field.name: given[field.name].value for field in fields(section) if _is_given(field, given)})
        for name, section in sections().items()
    }
    return RunConfig(**parts, ds_config={})


def _is_given(field: Field, given: Mapping[str, Provided]) -> bool:
    return "flag" in field.metadata and field.name in given


def _parallel(run: RunConfig, given: Mapping[str, Provided], environ: Mapping[str, str]) -> ParallelConfig:
    device = expected_device(environ)
    said = run.parallel
    said_so = "world_size" in given
    if said_so and not (run.logging.explain or run.logging.dry_run):
        raise ConfigError(
            f"{given['world_size'].source} is for --explain and --dry-run: the launcher starts the processes of a run"
        )
    return replace(
        said,
        world_size=said.world_size if said_so else world_size(environ),
        device=device,
        distributed_backend=said.distributed_backend or _BACKENDS.get(device),
        local_rank=local_rank(environ) if said.local_rank is None else said.local_rank,
    )


def _repartitioned(run: RunConfig, given: Mapping[str, Provided]) -> ParallelConfig:
    said = run.parallel
    if said.repartition_from is None or not said.uses_pipeline:
        return said
    if "pipeline_partition" in given:
        raise ConfigError(
            f"{given['repartition_from'].source} and {given['pipeline_partition'].source} exclude each other: give one"
        )
    return replace(said, pipeline_partition=repartitioned(said, run.model))


def _logging(run: RunConfig) -> LoggingConfig:
    if run.observe.run_dir is None or run.logging.metrics_file is not None:
        return run.logging
    return replace(run.logging, metrics_file=str(Path(run.observe.run_dir) / METRICS))


def _model(run: RunConfig, architecture: ArchitectureSpec) -> ModelConfig:
    said = run.model
    return replace(
        said,
        architecture=architecture.name,
        ffn_hidden_size=said.ffn_hidden_size or 4 * said.hidden_size,
        max_position_embeddings=said.max_position_embeddings or run.data.seq_length,
        reset_position_ids=run.data.reset_position_ids,
        reset_attention_mask=run.data.reset_attention_mask,
        dtype=run.precision.dtype,
        seed=run.train.seed,
        recomputes_attention=run.activation.recompute_granularity == "selective",
    )


def _activation(run: RunConfig) -> ActivationConfig:
    said = run.activation
    if said.recompute_granularity:
        return replace(said, checkpoint_activations=True)
    return replace(said, recompute_granularity="full") if said.checkpoint_activations else said


def _zero(run: RunConfig, given: Mapping[str, Provided]) -> ZeroConfig:
    if run.precision.dtype == "fp32" or "zero_stage" in given:
        return run.zero
    # Without ZeRO, DeepSpeed's half-precision optimizer measures the gradient norm of one tensor-parallel
    # rank only, and sums gradients in half precision. Stage 1 keeps both in fp32, for less memory.
    return replace(run.zero, zero_stage=1)


def _train(run: RunConfig, given: Mapping[str, Provided]) -> TrainConfig:
    batch = solve_batch(given, run.parallel.data_parallel_size)
    said = run.train
    iterations = said.train_iters if said.train_samples is None else said.train_samples // batch.global_size
    if said.train_samples is not None and iterations < 1:
        raise ConfigError(f"--train-samples {said.train_samples} is less than one global batch of {batch.global_size}")
    return replace(
        said,
        micro_batch_size=batch.micro_size,
        gradient_accumulation_steps=batch.accumulation,
        global_batch_size=batch.global_size,
        train_iters=iterations,
    )
