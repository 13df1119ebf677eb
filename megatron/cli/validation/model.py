"""Rules about the model: adapters, positions, attention, what a decoder needs, and mixtures of experts."""

from megatron.cli.validation.layout import stages_without
from megatron.cli.validation.rules import Messages, enabled, rule
from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.config.experts import LORA_TARGETS, layers_of_runs
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


@rule("the router chooses from the experts", why="It cannot choose more than there are.")
def chosen_experts(run: RunConfig) -> Messages:
    experts, chosen = run.model.num_experts, run.model.moe_router_topk
    if 0 < experts < chosen:
        yield f"--moe-router-topk {chosen} is more than --num-experts {experts}: lower it"


@rule("a list of layers with experts is of all layers", why="Each layer has experts or an MLP.")
def listed_layers(run: RunConfig) -> Messages:
    model, listed = run.model, run.model.moe_layer_freq
    if not isinstance(listed, str) or not model.has_experts:
        return
    layers = model.num_layers - model.vision_layers
    if (count := len(layers_of_runs(listed))) != layers > 0:
        yield f"--moe-layer-freq {listed} is of {count} layers, not of --num-layers {layers}: give one each"
    elif not any(layers_of_runs(listed)):
        yield f"--moe-layer-freq {listed} leaves no layer with experts: write 1 for some"


@rule(
    "experts are split as the other layers are",
    why="Tokens are sent to the rank with the same part of another expert: the ranks of tensor parallelism correspond.",
)
def expert_tensor_parallel_size(run: RunConfig) -> Messages:
    size, ranks = run.parallel.expert_tensor_parallel_size, run.parallel.model_parallel_size
    if size not in (0, ranks) and run.model.has_experts:
        yield f"--expert-tensor-parallel-size {size} differs from --model-parallel-size {ranks}: use {ranks}"


@rule(
    "expert-parallel ranks divide the data-parallel ranks",
    why="Ranks that read other samples divide the experts among them.",
)
def experts_over_data_ranks(run: RunConfig) -> Messages:
    ranks, parallel = run.parallel.expert_model_parallel_size, run.parallel
    if ranks < 1 or parallel.replica_size < 1 or parallel.world_size % parallel.replica_size:
        return
    if parallel.data_parallel_size % ranks:
        yield (
            f"--expert-model-parallel-size {ranks} does not divide the data-parallel size "
            f"{parallel.data_parallel_size}: use a divisor of it, or more processes"
        )


@rule(
    "with expert parallelism each stage has a layer with experts",
    why="DeepSpeed reduces the gradient norm once for each parameter group, and a stage without experts has no "
    "group of them. By parameters and FLOPs the stages depend on the vocabulary, which is not read yet.",
    otherwise="hangs in an all-reduce",
)
def experts_on_each_stage(run: RunConfig) -> Messages:
    if not run.model.has_experts or run.parallel.expert_model_parallel_size < 2 or run.parallel.pipe_stages < 2:
        return
    for place in stages_without(run, lambda layer: any(parameter.is_expert for parameter in layer.parameters)):
        yield (
            f"{place} without a layer with experts (--moe-layer-freq {run.model.moe_layer_freq}): give the number of "
            "layers of each stage"
        )


@rule(
    "compiled layers at ZeRO 3 get hidden states only",
    why="DeepSpeed reduces the gradients of a compiled layer in a hook that torch runs too early if the layer gets "
    "several tensors, such as with segment ids.",
    otherwise="reduces gradients before they exist",
)
def compiled_at_zero_3(run: RunConfig) -> Messages:
    if not run.model.compile or run.zero.zero_stage != 3:
        return
    if run.model.layers_need_segment_ids:
        yield "--compile with --zero-stage 3 excludes --reset-attention-mask: remove --compile, or use --zero-stage 2"
    elif architecture_of(run.model).masked_lm:
        yield "--compile with --zero-stage 3 excludes BERT: remove --compile, or use --zero-stage 2"
