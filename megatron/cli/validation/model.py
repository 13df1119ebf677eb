"""Rules about the model: adapters, positions, attention, decoders, mixtures of experts, and vision encoders."""

from functools import partial

from megatron.cli.validation.layout import stages_without
from megatron.cli.validation.rules import Messages, rule
from megatron.common.errors import counted
from megatron.config import ModelConfig, RunConfig
from megatron.config.experts import LORA_TARGETS, layer_list
from megatron.config.positions import ROTARY
from megatron.config.vision import PARTS
from megatron.model import partition
from megatron.model.architectures import architecture_of
from megatron.model.spec import LayerSpec


@rule()
def lora_targets(run: RunConfig) -> Messages:
    """Adapters belong to complete linear layers. Queries, keys and values are one matrix here, as are gate and up."""
    chosen = set(run.model.lora_target)
    known = {name for target, parts in LORA_TARGETS.items() for name in (target, *parts)}
    for name in sorted(chosen - known):
        yield f"--lora-target {name} is unknown: choose from {' '.join(LORA_TARGETS)}"
    for target, parts in LORA_TARGETS.items():
        given = chosen & set(parts)
        if given and target not in chosen and given != set(parts):
            yield f"--lora-target {' '.join(sorted(given))} needs all of {' '.join(parts)}: add the others"


@rule()
def yarn(run: RunConfig) -> Messages:
    """YaRN has ordered bounds and a base above 1. It interpolates the wavelengths between the bounds."""
    model = run.model
    if model.position_embedding_type != "yarn":
        return
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"--yarn-beta-fast {model.yarn_beta_fast:g} is no more than --yarn-beta-slow {model.yarn_beta_slow:g}: "
            "raise it"
        )
    if model.rotary_base <= 1:
        yield f"--position-embedding-type yarn needs a base above 1: raise --rotary-base {model.rotary_base}"


@rule()
def rotated_dimensions(run: RunConfig) -> Messages:
    """RoPE needs an even number of dimensions. It rotates pairs of dimensions of a head."""
    model = run.model
    if not (model.has_rotary_embedding and model.num_attention_heads > 0):
        return
    dimensions = int(model.head_size * model.rotary_percent)
    if dimensions < 2 or dimensions % 2:
        yield (
            f"--rotary-percent {model.rotary_percent:g} of heads of {model.head_size} rotates {dimensions} dimensions, "
            "which is not an even number: change --rotary-percent or --kv-channels"
        )


@rule()
def tiled_adapters(run: RunConfig) -> Messages:
    """--tiled-mlp excludes the dropout of adapters.

    The forward pass of a tile is recomputed, and would draw another dropout mask.
    """
    if run.model.tiled_mlp and run.model.lora_dropout and {"dense_h_to_4h", "dense_4h_to_h"} & {*run.model.adapted}:
        yield f"--tiled-mlp and --lora-dropout {run.model.lora_dropout:g} exclude each other: remove one"


@rule()
def buckets(run: RunConfig) -> Messages:
    """Relative positions have an even number of buckets. Half of them are for exact distances."""
    number, distance = run.model.relative_attention_num_buckets, run.model.relative_attention_max_distance
    if run.model.has_relative_positions and (number % 2 or distance <= number // 2):
        yield (
            f"--relative-attention-num-buckets {number} must be even, and half of it less than "
            f"--relative-attention-max-distance {distance}"
        )


@rule()
def positions_of_t5(run: RunConfig) -> Messages:
    """Only T5 has relative positions. Other models have no table for them, and T5 has no RoPE."""
    kind = run.model.position_embedding_type
    if (kind == "relative" and not _is_t5(run)) or (kind in ROTARY and _is_t5(run)):
        others = "relative, learned_absolute or none" if _is_t5(run) else "learned_absolute, rope or none"
        yield f"--position-embedding-type {kind} does not suit {run.model.architecture}: use {others}"


def _is_t5(run: RunConfig) -> bool:
    return architecture_of(run.model).is_encoder_decoder


@rule()
def split_rank(run: RunConfig) -> Messages:
    """The split rank leaves stages with layers to encoder and decoder.

    The stages before it hold the encoder, the others the decoder.
    """
    parallel, model = run.parallel, run.model
    split, stages = parallel.pipeline_model_parallel_split_rank, parallel.pipe_stages
    if split is None or not (_is_t5(run) and parallel.uses_pipeline) or parallel.chunks_per_stage > 1:
        return
    flag = f"--pipeline-model-parallel-split-rank {split}"
    if not 0 < split < stages:
        rest = f"use from 1 to {stages - 1}" if stages > 1 else "raise the latter"
        yield f"{flag} is not a stage after the first one of --pipe-parallel-size {stages}: {rest}"
    elif partition.explicit(parallel.pipeline_partition):
        yield f"{flag} and --pipeline-partition {parallel.pipeline_partition} exclude each other: give one"
    elif model.encoder_num_layers < split:
        stages_of = counted(split, "stage")
        yield f"{flag} gives {stages_of} to the encoder of {counted(model.encoder_num_layers, 'layer')}: lower it"
    elif model.decoder_num_layers < stages - split:
        stages_of = counted(stages - split, "stage")
        yield f"{flag} gives {stages_of} to the decoder of {counted(model.decoder_num_layers, 'layer')}: raise it"


@rule()
def chosen_experts(run: RunConfig) -> Messages:
    """The router chooses from the experts. It cannot choose more than there are."""
    experts, chosen = run.model.num_experts, run.model.moe_router_topk
    if 0 < experts < chosen:
        yield f"--moe-router-topk {chosen} is more than --num-experts {experts}: lower it"


@rule()
def listed_layers(run: RunConfig) -> Messages:
    """A list for --moe-layer-freq has an entry for each layer. Each layer has experts or an MLP."""
    model, listed = run.model, run.model.moe_layer_freq
    if not isinstance(listed, str) or not model.has_experts:
        return
    layers = model.num_layers - model.vision_layers
    if (count := len(layer_list(listed))) != layers > 0:
        yield f"--moe-layer-freq {listed} has {count} entries for --num-layers {layers}: give one for each layer"
    elif not any(layer_list(listed)):
        yield f"--moe-layer-freq {listed} leaves no layer with experts: write 1 for some"


@rule()
def experts_over_data_ranks(run: RunConfig) -> Messages:
    """Expert-parallel ranks divide the data-parallel ranks.

    Data-parallel ranks divide the experts among each other.
    """
    ranks, parallel = run.parallel.expert_model_parallel_size, run.parallel
    if ranks < 1 or parallel.replica_size < 1 or parallel.world_size % parallel.replica_size:
        return
    if parallel.data_parallel_size % ranks:
        yield (
            f"--expert-model-parallel-size {ranks} does not divide the data-parallel size "
            f"{parallel.data_parallel_size}: use a divisor of it, or more processes"
        )


@rule(otherwise="hangs in an all-reduce")
def experts_on_each_stage(run: RunConfig) -> Messages:
    """With expert parallelism each stage has a layer with experts.

    DeepSpeed reduces the gradient norm once for each parameter group, and a stage without experts has no group for
    experts. Partitions by parameters and FLOPs depend on the vocabulary size, which is not known yet.
    """
    if not run.model.has_experts or run.parallel.expert_model_parallel_size < 2 or run.parallel.pipe_stages < 2:
        return
    for place in stages_without(run, lambda layer: any(parameter.is_expert for parameter in layer.parameters)):
        yield (
            f"{place} without a layer with experts (--moe-layer-freq {run.model.moe_layer_freq}): give the number of "
            "layers of each stage"
        )


@rule(otherwise="reduces gradients before they exist")
def compiled_at_zero_3(run: RunConfig) -> Messages:
    """Compiled layers at ZeRO 3 have hidden states as their only input.

    DeepSpeed reduces the gradients of a compiled layer in a hook that torch runs too early if the layer gets
    several tensors, such as with segment ids.
    """
    if not run.model.compile or run.zero.zero_stage != 3:
        return
    if run.model.layers_need_segment_ids:
        yield "--compile with --zero-stage 3 excludes --reset-attention-mask: remove --compile, or use --zero-stage 2"
    elif architecture_of(run.model).masked_lm:
        yield "--compile with --zero-stage 3 excludes BERT: remove --compile, or use --zero-stage 2"


@rule()
def feature_layer(run: RunConfig) -> Messages:
    """The projector reads a layer of the encoder. Layers count from 1, or from -1 (the last) backwards."""
    count, layer = run.model.vision_num_layers, run.model.vision_feature_layer
    if count > 0 and not 1 <= run.model.vision_layers <= count:
        valid = f"1 to {count}, or {-count} to -1"
        yield f"--vision-feature-layer {layer} is not one of --vision-num-layers {count}: use {valid}"


@rule()
def image_fits(run: RunConfig) -> Messages:
    """A sample has room for an image. An image that does not fit is cut off, with all that follows it."""
    model, length = run.model, run.data.seq_length
    patch, size = model.vision_patch_size, model.vision_image_size
    if not model.vision_num_layers or patch < 1:
        return
    if patch > size:
        yield f"--vision-patch-size {patch} is more than --vision-image-size {size}"
    elif model.image_tokens >= length > 0:
        image = f"the {model.image_tokens} tokens of --vision-image-size {size}"
        yield f"--seq-length {length} has no room for {image} and an answer: raise it"


@rule(otherwise="fails on the empty list of parameters")
def stages_train(run: RunConfig) -> Messages:
    """Every stage has something to train.

    DeepSpeed's optimizers need a parameter, and a backward pass something to compute. Partitions by parameters and
    FLOPs depend on the vocabulary size, which is not known yet.
    """
    model = run.model
    flags = " ".join(f"--freeze-{part}" for part in model.frozen_parts).replace("language", "language-model")
    if len(model.frozen_parts) == len(PARTS):
        yield f"{flags} leave nothing to train: remove one"
    elif flags or model.lora_rank:
        flags = flags or f"--lora-rank {model.lora_rank}"
        for place in stages_without(run, partial(_trains, model), first_chunk=bool(model.frozen_parts)):
            yield (
                f"{place} with nothing to train, with {flags}: give the number of layers of each stage, or use "
                "--zero-stage 3 or --model-parallel-size instead of a pipeline"
            )


def _trains(model: ModelConfig, layer: LayerSpec) -> bool:
    """Whether ``layer`` has a parameter that is trained."""
    if not layer.parameters or layer.part in ("", *model.frozen_parts):
        return False
    return layer.part != "language" or not model.lora_rank or layer.is_block
