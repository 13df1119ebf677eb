"""Rules about the model: adapters, positions, attention, and what a decoder needs."""

from megatron.cli.validation.rules import Messages, enabled, rule
from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.config.adapters import LORA_TARGETS
from megatron.config.positions import ROTARY
from megatron.model import partition
from megatron.model.architectures import architecture_of


@rule(
    "adapters belong to complete linear layers", why="Queries, keys and values are one matrix here, as are gate and up."
)
def lora_targets(run: RunConfig) -> Messages:
    chosen = set(run.model.lora_target)
    known = {name for target, parts in LORA_TARGETS.items() for name in (target, *parts)}
    for name in sorted(chosen - known):
        yield f"--lora-target {name} is unknown: choose from {' '.join(LORA_TARGETS)}"
    for target, parts in LORA_TARGETS.items():
        given = chosen & set(parts)
        if given and target not in chosen and given != set(parts):
            yield f"--lora-target {' '.join(sorted(given))} needs all of {' '.join(parts)}: add the others"


@rule("YaRN stretches waves from short to long ones", why="It extends a model that is trained already.")
def yarn(run: RunConfig) -> Messages:
    model = run.model
    if model.position_embedding_type != "yarn":
        return
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"--yarn-beta-fast {model.yarn_beta_fast:g} is no more than --yarn-beta-slow {model.yarn_beta_slow:g}: "
            "raise it"
        )
    if model.rotary_base <= 1:
        yield f"--position-embedding-type yarn needs waves that become longer: raise --rotary-base {model.rotary_base}"


@rule("RoPE needs an even number of dimensions", why="It rotates pairs of dimensions of a head.")
def rotated_dimensions(run: RunConfig) -> Messages:
    model = run.model
    if not (model.has_rotary_embedding and model.num_attention_heads > 0):
        return
    dimensions = int(model.head_size * model.rotary_percent)
    if dimensions < 2 or dimensions % 2:
        yield (
            f"--rotary-percent {model.rotary_percent:g} of heads of {model.head_size} rotates {dimensions} dimensions, "
            "which is no even number: change --rotary-percent or --kv-channels"
        )


@rule(
    "--tiled-mlp excludes the dropout of adapters",
    why="The forward pass of a part is repeated, and would draw another mask.",
)
def tiled_adapters(run: RunConfig) -> Messages:
    if run.model.tiled_mlp and run.model.lora_dropout and {"dense_h_to_4h", "dense_4h_to_h"} & {*run.model.adapted}:
        yield f"--tiled-mlp and --lora-dropout {run.model.lora_dropout:g} exclude each other: remove one"


@rule(
    "the fused causal attention kernel has no sliding window",
    why="Otherwise another kernel would run, silently.",
)
def fused_attention(run: RunConfig) -> Messages:
    if run.model.scaled_upper_triang_masked_softmax_fusion and run.model.pre_tokens < run.data.seq_length - 1:
        flag, window = "--scaled-upper-triang-masked-softmax-fusion", f"--pre-tokens {run.model.pre_tokens}"
        yield f"{flag} cannot be combined with {window}: remove {flag}, or remove {window}"


@rule("relative positions have an even number of buckets", why="Half of them are for exact distances.")
def buckets(run: RunConfig) -> Messages:
    number, distance = run.model.relative_attention_num_buckets, run.model.relative_attention_max_distance
    if run.model.has_relative_positions and (number % 2 or distance <= number // 2):
        yield (
            f"--relative-attention-num-buckets {number} must be even, and half of it less than "
            f"--relative-attention-max-distance {distance}"
        )


@rule("relative positions are T5's", why="The other models have no table of them, and T5 has no rotation.")
def positions_of_t5(run: RunConfig) -> Messages:
    kind = run.model.position_embedding_type
    if (kind == "relative" and not _is_t5(run)) or (kind in ROTARY and _is_t5(run)):
        others = "relative, learned_absolute or none" if _is_t5(run) else "learned_absolute, rope or none"
        yield f"--position-embedding-type {kind} does not suit {run.model.architecture}: use {others}"


def _is_t5(run: RunConfig) -> bool:
    return architecture_of(run.model).is_encoder_decoder


@rule(
    "an encoder with a decoder excludes sequence parallelism",
    why="It is for hidden states of one sequence, and T5 has two of different lengths.",
)
def one_sequence(run: RunConfig) -> Messages:
    parallel = run.parallel
    given = enabled(
        {
            "--sequence-parallel": parallel.sequence_parallel,
            f"--ds-sequence-parallel-size {parallel.ds_sequence_parallel_size}": parallel.ds_sequence_parallel_size > 1,
            f"--context-parallel-size {parallel.context_parallel_size}": parallel.context_parallel_size > 1,
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
