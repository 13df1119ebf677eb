"""From what was given to a whole run: what was left open follows from the rest and from the environment."""

from collections.abc import Mapping
from dataclasses import Field, fields, replace

from megatron.arguments.batch_size import solve_batch
from megatron.config import ActivationConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig, ZeroConfig
from megatron.config.architecture import GPT2, Architecture
from megatron.errors import ConfigError
from megatron.given import Given, sections
from megatron.launch.device import expected_device
from megatron.launch.launcher import local_rank, world_size

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def resolve_run(
    given: Mapping[str, Given], environ: Mapping[str, str], architecture: Architecture = GPT2
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
    run = replace(run, activation=_activation(run))
    run = replace(run, model=_model(run, architecture), zero=_zero(run, given))
    # The batch can be judged only where the processes fall into whole replicas.
    replica = run.parallel.replica_size
    if not problems and replica >= 1 and run.parallel.world_size % replica == 0:
        try:
            run = replace(run, train=_train(run, given))
        except ConfigError as error:
            problems += error.messages
    return run, problems


def _build(given: Mapping[str, Given]) -> RunConfig:
    parts = {
        name: section(**{field.name: given[field.name].value for field in fields(section) if _is_given(field, given)})
        for name, section in sections().items()
    }
    return RunConfig(**parts, ds_config={})


def _is_given(field: Field, given: Mapping[str, Given]) -> bool:
    return "flag" in field.metadata and field.name in given


def _parallel(run: RunConfig, given: Mapping[str, Given], environ: Mapping[str, str]) -> ParallelConfig:
    device = expected_device(environ)
    said = run.parallel
    explained = "world_size" in given
    if explained and not run.logging.explain:
        raise ConfigError(f"{given['world_size'].source} is for --explain: the launcher starts the processes of a run")
    return replace(
        said,
        world_size=said.world_size if explained else world_size(environ),
        device=device,
        distributed_backend=said.distributed_backend or _BACKENDS.get(device),
        local_rank=local_rank(environ) if said.local_rank is None else said.local_rank,
    )


def _model(run: RunConfig, architecture: Architecture) -> ModelConfig:
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


def _zero(run: RunConfig, given: Mapping[str, Given]) -> ZeroConfig:
    if run.precision.dtype == "fp32" or "zero_stage" in given:
        return run.zero
    # Without ZeRO, DeepSpeed's half-precision optimizer measures the gradient norm of one tensor-parallel
    # rank only, and sums gradients in half precision. Stage 1 keeps both in fp32, for less memory.
    return replace(run.zero, zero_stage=1)


def _train(run: RunConfig, given: Mapping[str, Given]) -> TrainConfig:
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
