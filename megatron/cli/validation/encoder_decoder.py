"""Rules about models with an encoder and a decoder, and about what only they have."""

from megatron.cli.validation.rules import Messages, enabled, rule
from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.config.positions import ROTARY
from megatron.model import partition
from megatron.model.architectures import architecture_of


def _is_t5(run: RunConfig) -> bool:
    return architecture_of(run.model).is_encoder_decoder


@rule(
    "an encoder with a decoder excludes sequence parallelism and DualPipeV",
    why="They are for hidden states of one sequence, and T5 has two of different lengths: DeepSpeed's DualPipeV would "
    "run a backward pass for each of the tensors that a stage sends on.",
)
def one_sequence(run: RunConfig) -> Messages:
    parallel = run.parallel
    given = enabled(
        {
            "--sequence-parallel": parallel.sequence_parallel,
            f"--ds-sequence-parallel-size {parallel.ds_sequence_parallel_size}": parallel.ds_sequence_parallel_size > 1,
            f"--context-parallel-size {parallel.context_parallel_size}": parallel.context_parallel_size > 1,
            f"--pipeline-schedule {parallel.pipeline_schedule}": parallel.uses_dualpipev,
        }
    )
    if given and _is_t5(run):
        yield f"{given} cannot be combined with a model that has an encoder and a decoder: remove it"


@rule("a decoder has a sequence length", why="It has no default that fits every encoder.")
def decoder_length(run: RunConfig) -> Messages:
    if _is_t5(run) and run.data.decoder_seq_length < 1:
        yield "--decoder-seq-length is required"


@rule("the spans of a sample have sentinels", why="Each span that is taken out of a text leaves one in its place.")
def sentinels(run: RunConfig) -> Messages:
    if _is_t5(run) and run.data.vocab_extra_ids < 1:
        yield "--vocab-extra-ids 0 leaves no sentinel for a span: use 100, or more"


@rule("decoder positions cover the sequence", why="Each token of the decoder needs a learned position.")
def decoder_positions(run: RunConfig) -> Messages:
    tokens, rows = run.data.decoder_seq_length, run.model.max_position_embeddings
    if _is_t5(run) and run.model.has_position_table and tokens > rows > 0:
        yield f"--decoder-seq-length {tokens} is more than --max-position-embeddings {rows}: raise the latter"


@rule("relative positions are T5's", why="The other models have no table of them, and T5 has no rotation.")
def positions_of_t5(run: RunConfig) -> Messages:
    kind = run.model.position_embedding_type
    if (kind == "relative" and not _is_t5(run)) or (kind in ROTARY and _is_t5(run)):
        others = "relative, learned_absolute or none" if _is_t5(run) else "learned_absolute, rope or none"
        yield f"--position-embedding-type {kind} does not suit {run.model.architecture}: use {others}"


@rule("buckets belong to relative positions", why="They would be silently ignored otherwise.")
def buckets(run: RunConfig) -> Messages:
    model = run.model
    number, distance = model.relative_attention_num_buckets, model.relative_attention_max_distance
    default = (type(model).relative_attention_num_buckets, type(model).relative_attention_max_distance)
    if not model.has_relative_positions and (number, distance) != default:
        yield "--relative-attention-num-buckets and -max-distance need --position-embedding-type relative: remove them"
    if model.has_relative_positions and (number % 2 or distance <= number // 2):
        yield (
            f"--relative-attention-num-buckets {number} must be even, and half of it less than "
            f"--relative-attention-max-distance {distance}"
        )


@rule("GEGLU excludes the fused GELU", why="An MLP has one activation.")
def geglu(run: RunConfig) -> Messages:
    if run.model.geglu and run.model.bias_gelu_fusion:
        yield "--geglu and --bias-gelu-fusion exclude each other: give --no-geglu, or remove --bias-gelu-fusion"


@rule(
    "the split rank leaves stages with layers to encoder and decoder",
    why="The stages before it hold the encoder, the others the decoder.",
)
def split_rank(run: RunConfig) -> Messages:
    parallel, model = run.parallel, run.model
    split, stages = parallel.pipeline_model_parallel_split_rank, parallel.pipe_stages
    if split is None or not _is_t5(run):
        return
    flag = f"--pipeline-model-parallel-split-rank {split}"
    if not parallel.uses_pipeline or stages < 2:
        yield f"{flag} needs a pipeline: add --pipe-parallel-size, 2 or more"
    elif not 0 < split < stages:
        rest = "1" if stages == 2 else f"from 1 to {stages - 1}"
        yield f"{flag} is no stage between the first and the end of --pipe-parallel-size {stages}: use {rest}"
    elif parallel.chunks_per_stage > 1:
        yield (
            f"{flag} divides stages, and with --pipeline-schedule {parallel.pipeline_schedule} each has several model "
            "chunks: remove it, or use --pipeline-schedule zbh1"
        )
    elif partition.explicit(parallel.pipeline_partition):
        yield f"{flag} and --pipeline-partition {parallel.pipeline_partition} exclude each other: give one"
    elif model.encoder_num_layers < split:
        stages_of = counted(split, "stage")
        yield f"{flag} gives {stages_of} to the encoder of {counted(model.encoder_num_layers, 'layer')}: lower it"
    elif model.decoder_num_layers < stages - split:
        stages_of = counted(stages - split, "stage")
        yield f"{flag} gives {stages_of} to the decoder of {counted(model.decoder_num_layers, 'layer')}: raise it"
