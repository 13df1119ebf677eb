"""Resolves the final value of every config field: derives missing ones from other fields and the environment."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from megatron.cli.batch_sizes import GLOBAL, ramp_up, read_steps, solve_batch
from megatron.cli.provided import Provided
from megatron.common.environment import expected_device, local_rank, world_size
from megatron.common.errors import ConfigError, DataError
from megatron.common.tokenizer_files import NULL_TOKENIZER, PUBLISHED, tokenizer_files, tokenizer_kind
from megatron.config import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
    default_ffn_hidden_size,
    sections,
)
from megatron.config.batch_schedule import Steps
from megatron.config.data import DEFAULT_VOCABULARY
from megatron.model.architectures import GPT2
from megatron.model.partition import explicit, repartitioned
from megatron.model.spec import ArchitectureSpec

METRICS = "metrics.jsonl"
"""Name of the metrics file in --run-dir."""
_VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def resolve_run(
    provided: Mapping[str, Provided], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2
) -> tuple[RunConfig, list[str]]:
    """The run with the final value of every field, and a message for each field that cannot be resolved.

    The vocabulary sizes and the DeepSpeed config are set later.
    """
    run = _with_provided(provided)
    recomputed = run.activation.recompute_granularity or ("full" if run.activation.checkpoint_activations else None)
    activation = replace(run.activation, recompute_granularity=recomputed, checkpoint_activations=bool(recomputed))
    run = replace(run, activation=activation, data=_data(run.data, provided, architecture))
    run = replace(run, model=_model(run, architecture, provided), zero=_zero(run))
    if architecture.reads_images:
        run = replace(run, data=replace(run.data, image_format=tuple(run.model.image_format)))
    observe = replace(run.observe, profile_dir=run.observe.profile_dir or run.observe.trace)
    if observe.run_dir is not None and run.logging.metrics_file is None:
        run = replace(run, logging=replace(run.logging, metrics_file=str(Path(observe.run_dir) / METRICS)))
    run = replace(run, observe=observe)
    problems: list[str] = []
    for step in (_parallel, _virtual_stages, _repartitioned):
        try:
            run = replace(run, parallel=step(run, provided, environ))
        except ConfigError as error:
            problems += error.messages
    # The batch sizes are known only if the processes form complete replicas.
    replica = run.parallel.replica_size
    if not problems and replica >= 1 and run.parallel.world_size % replica == 0:
        try:
            run = replace(run, train=_train(run, provided))
            run = run.with_image_slots(run.train.micro_batch_size)  # the data may need more
        except ConfigError as error:
            problems += error.messages
    return run, problems


def _with_provided(provided: Mapping[str, Provided]) -> RunConfig:
    parts = {}
    for name, section in sections().items():
        names = [field.name for field in fields(section) if "flag" in field.metadata and field.name in provided]
        parts[name] = section(**{field: provided[field].value for field in names})
    return RunConfig(**parts, ds_config={})


def _parallel(run: RunConfig, provided: Mapping[str, Provided], environ: Mapping[str, str]) -> ParallelConfig:
    device, parallel = expected_device(environ), run.parallel
    pretended = "world_size" in provided
    if pretended and not (run.logging.explain or run.logging.dry_run):
        raise ConfigError(f"{provided['world_size'].source} is for --explain and --dry-run: remove it")
    return replace(
        parallel,
        world_size=parallel.world_size if pretended else world_size(environ),
        device=device,
        distributed_backend=parallel.distributed_backend or _BACKENDS.get(device),
        local_rank=local_rank(environ) if parallel.local_rank is None else parallel.local_rank,
    )


def _virtual_stages(run: RunConfig, provided: Mapping[str, Provided], environ: Mapping[str, str]) -> ParallelConfig:
    """Set the number of model chunks per stage. A flag for model chunks selects the interleaved schedule."""
    parallel, numbers = run.parallel, explicit(run.parallel.pipeline_partition)
    flags = [provided[name].source for name in _VIRTUAL_STAGES if name in provided]
    if not parallel.uses_pipeline or (parallel.pipeline_schedule != "interleaved" and not flags):
        return parallel
    if flags and "pipeline_schedule" in provided and parallel.pipeline_schedule != "interleaved":
        given = provided["pipeline_schedule"].source
        raise ConfigError(f"{flags[0]} is for --pipeline-schedule interleaved, and {given} is given: remove one")
    per_chunk, chunks = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if per_chunk is not None:
        if numbers is not None:
            raise ConfigError(f"{flags[0]} and {provided['pipeline_partition'].source} exclude each other: give one")
        chunks, rest = divmod(run.model.num_layers, max(per_chunk * parallel.pipe_stages, 1))
        if rest or chunks < 2:
            raise ConfigError(
                f"--num-layers {run.model.num_layers} is not two or more times {flags[0]} x --pipe-parallel-size "
                f"{parallel.pipe_stages}: change one of them, or use --num-virtual-stages-per-pipeline-rank"
            )
    elif chunks is None:
        chunks, rest = divmod(len(numbers or ()), parallel.pipe_stages)
        if rest or chunks < 2:
            raise ConfigError(
                "--pipeline-schedule interleaved needs model chunks: give --num-layers-per-virtual-pipeline-stage, "
                "--num-virtual-stages-per-pipeline-rank, or --pipeline-partition with a number for each chunk"
            )
    return replace(parallel, pipeline_schedule="interleaved", num_virtual_stages_per_pipeline_rank=chunks)


def _repartitioned(run: RunConfig, provided: Mapping[str, Provided], environ: Mapping[str, str]) -> ParallelConfig:
    parallel = run.parallel
    if parallel.repartition_from is None or not parallel.uses_pipeline or "pipeline_partition" in provided:
        return parallel
    return replace(parallel, pipeline_partition=repartitioned(parallel, run.model))


def _data(data: DataConfig, provided: Mapping[str, Provided], architecture: ArchitectureSpec) -> DataConfig:
    if "tokenizer_type" not in provided:
        is_null = data.mock_data and data.vocab_file is data.tokenizer_model is None
        kind = NULL_TOKENIZER if is_null else tokenizer_kind(None, data.tokenizer_model, architecture.tokenizers[0])
    else:
        kind = tokenizer_kind(data.tokenizer_type, data.tokenizer_model)
    data = replace(data, tokenizer_type=kind)
    from_hf = "vocab_size" in provided and provided["vocab_size"].source.startswith("--load-hf ")
    if from_hf and kind not in (NULL_TOKENIZER, *PUBLISHED):  # the files of the tokenizer decide
        data = replace(data, vocab_size=None)
    files = tokenizer_files(data.tokenizer_type, data.vocab_file, data.merge_file, data.tokenizer_model)
    data = replace(data, vocab_file=files[0], merge_file=files[1])
    if architecture.provider is not None:
        data = replace(data, seq_length=data.seq_length or 1)  # a sample counts as one token
    if data.mock_data and data.tokenizer_type == NULL_TOKENIZER and data.vocab_size is None:
        return replace(data, vocab_size=DEFAULT_VOCABULARY[architecture.masked_lm is not False])
    return data


def _model(run: RunConfig, architecture: ArchitectureSpec, provided: Mapping[str, Provided]) -> ModelConfig:
    model = _both_stacks(run) if architecture.is_encoder_decoder else run.model
    if architecture.reads_images:  # from here on ``num_layers`` includes the vision encoder
        layers = model.num_layers + model.vision_layers
        model = replace(model, num_layers=layers, text_seq_length=run.data.seq_length)
    packs = run.data.sft and not architecture.is_encoder_decoder
    positions = model.max_position_embeddings or max(run.data.seq_length, run.data.decoder_seq_length)
    # Its default, Megatron-LM's, is no limit, although sequences may be longer today.
    is_short = "pre_tokens" not in provided and model.pre_tokens < run.data.seq_length - 1
    return replace(
        model,
        architecture=architecture.name,
        num_experts=model.num_experts if model.has_experts else 0,
        ffn_hidden_size=model.ffn_hidden_size or default_ffn_hidden_size(model),
        max_position_embeddings=positions,
        pre_tokens=positions - 1 if is_short else model.pre_tokens,
        pre_tokens_given="pre_tokens" in provided,
        reset_position_ids=run.data.reset_position_ids or packs,
        reset_attention_mask=run.data.reset_attention_mask or packs,
        dtype=run.precision.dtype,
        seed=run.train.seed,
        recomputes_attention=run.activation.recompute_granularity == "selective",
    )


def _both_stacks(run: RunConfig) -> ModelConfig:
    """The model with layers and lengths of encoder and decoder; from here on ``num_layers`` counts both."""
    model, encoder = run.model, run.model.num_layers
    decoder = model.decoder_num_layers or encoder
    return replace(
        model,
        num_layers=encoder + decoder,
        encoder_num_layers=encoder,
        decoder_num_layers=decoder,
        encoder_seq_length=run.data.seq_length,
        decoder_seq_length=run.data.decoder_seq_length,
    )


def _zero(run: RunConfig) -> ZeroConfig:
    """Replace stage 0 in half precision, default or provided, by stage 1, which computes what stage 0 should.

    DeepSpeed 0.19.8 without ZeRO clips with the gradient norm of one tensor-parallel rank; in fp16 it does not scale
    the loss, but divides the gradient by the scale; in bf16 on ``DeepSpeedEngine`` it keeps no fp32 weights.
    """
    is_replaced = run.precision.dtype != "fp32" and run.zero.zero_stage == 0
    return replace(run.zero, zero_stage=1) if is_replaced else run.zero


def _train(run: RunConfig, provided: Mapping[str, Provided]) -> TrainConfig:
    train = run.train
    steps: Steps = ()
    if train.step_batch_size_schedule is not None:
        steps = read_steps(train.step_batch_size_schedule, run.data.seq_length)
        largest = max(size for _, size in steps)
        provided = {**provided, GLOBAL: provided["step_batch_size_schedule"]._replace(value=largest)}
    batch = solve_batch(provided, run.parallel.data_parallel_size)
    if train.rampup_batch_size:
        steps = ramp_up(train.rampup_batch_size, batch.global_size)
    train = replace(
        train,
        micro_batch_size=batch.micro_size,
        gradient_accumulation_steps=batch.accumulation,
        global_batch_size=batch.global_size,
        batch_steps=steps if len(steps) > 1 else (),
    )
    if train.epochs is not None and run.data.sft:
        samples = 1.0
        with suppress(DataError, ValueError):  # the checks of the data and of the blend raise it again
            from megatron.data.datasets import samples_per_epoch  # imports NumPy: keeps other errors fast

            samples = train.epochs * samples_per_epoch(run.data)
        train = replace(train, train_iters=math.ceil(samples / batch.global_size))
    if train.train_samples is not None:
        iterations = train.batches.iterations(train.train_samples)
        if iterations < 1:
            size = train.batches.size(1)
            raise ConfigError(
                f"--train-samples {train.train_samples} is less than one global batch of {size}: raise it, or lower "
                "--global-batch-size"
            )
        train = replace(train, train_iters=iterations)
    if "eval_iters" in provided:
        return train
    return replace(train, eval_iters=min(max(train.train_iters // 10, 1), train.eval_iters))
