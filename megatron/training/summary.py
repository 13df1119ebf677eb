"""Describes a run configuration in lines of text. No torch here."""

from collections.abc import Sequence

from megatron.common.errors import counted
from megatron.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from megatron.config.data import Part
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import model_title
from megatron.model.partition import plan
from megatron.model.spec import active_parameters, fp8_weights, linear_weights, parameter_counts
from megatron.ops.choices import DeviceFacts, attention_kernel


def describe_config(run: RunConfig, device: DeviceFacts | None = None) -> dict[str, str]:
    """Layout, model, data, batch, schedule, precision and attention kernel: name to one line of text.

    The attention kernel is the one chosen on ``device``, by default on a recent device of the run's kind.
    """
    parallel, train, model = run.parallel, run.train, run.model
    engine = "DeepSpeedEngine"
    if parallel.uses_pipeline:
        engine = f"pipeline engine, {counted(parallel.pipe_stages, 'stage')}"
    experts = parallel.expert_model_parallel_size
    divided = f", experts over {experts} data-parallel ranks" if experts > 1 else ""
    sequence = _sequence_ranks(parallel)
    final_lr = "" if run.optim.lr_decay_style == "constant" else f" to {run.optim.min_lr:g}"
    vocabulary = f"{model.vocab_size:,} padded to {model.padded_vocab_size:,}" if model.vocab_size else "unknown"
    return {
        "layout": f"{counted(parallel.world_size, 'process')} = TP {parallel.model_parallel_size}"
        f" x PP {parallel.pipe_stages}{sequence} x DP {parallel.data_parallel_size}"
        f"{divided}, {engine}, ZeRO {run.zero.zero_stage}"
        f"{', gradients reduced once per step' if run.coalesces_grad_reduction else ''}",
        "model": f"{_sizes(model)}, sequence {run.data.seq_length}, vocabulary {vocabulary}",
        **_experts(model),
        **_images(model),
        **_adapters(model),
        "data": _data(run.data) if architecture_of(run.model).is_language_model else "labeled rows",
        "batch": f"{counted(train.global_batch_size, 'sample')} = micro {train.micro_batch_size}"
        f" x accumulation {train.gradient_accumulation_steps} x DP {parallel.data_parallel_size}"
        f" = {train.global_batch_size * run.data.seq_length:,} tokens per iteration{_batch_steps(train)}",
        "training": f"{counted(train.train_iters, 'iteration')}, lr {run.optim.lr:g}{final_lr}"
        f" ({run.optim.lr_decay_style}, {counted(int(run.optim.warmup_steps(train)), f'warm-up {train.lr_unit}')}),"
        f" clip {run.optim.clip_grad:g}",
        "precision": f"{run.precision.dtype}, {_recomputed(run)}{_mlp(model)}",
        **_attention(run, device or DeviceFacts(parallel.device)),
        **_fp8(run),
    }


def _sizes(model: ModelConfig) -> str:
    """Name, layers and sizes of a model; for a user-provided model only the sizes that are given."""
    if architecture_of(model).provider is not None:
        sizes = {"layers": model.num_layers, "hidden": model.hidden_size, "heads": model.num_attention_heads}
        return ", ".join([model.architecture, *(f"{name} {size}" for name, size in sizes.items() if size)])
    kinds = ", ".join([_heads(model), *layer_kinds(model)])
    preset = f" (preset {model.model_preset})" if model.model_preset else ""  # of which flags may change the sizes
    return f"{model_title(model)}{preset}, {_layers(model)}, hidden {model.hidden_size}, {kinds}"


def _sequence_ranks(parallel: ParallelConfig) -> str:
    """The sizes of context parallelism and DeepSpeed-Ulysses, and how their ranks communicate; empty without them."""
    context, ulysses, kind = parallel.context_parallel_size, parallel.ds_sequence_parallel_size, parallel.cp_comm_type
    levels = " x ".join(map(str, parallel.hierarchical_context_parallel_sizes))
    how = f"{kind}: {levels}" if levels else kind
    return (f" x CP {context} ({how})" if context > 1 else "") + (f" x SP {ulysses}" if ulysses > 1 else "")


def layer_kinds(model: ModelConfig) -> list[str]:
    """How the layers of ``model`` differ from GPT-2's, such as RMSNorm and SwiGLU; empty if they do not."""
    scaling = f", long waves x {model.rope_scaling_factor:g}" if model.use_rope_scaling else ""
    if (factor := model.rotary_seq_len_interpolation_factor) != 1:
        scaling = f", all waves x {factor:g}"
    if model.position_embedding_type == "yarn":
        scaling = (
            f", YaRN x {model.yarn_rotary_scaling_factor:g} of {model.yarn_original_max_position_embeddings:,} tokens"
        )
    share = f", {model.rotary_percent:.0%} of each head" if model.rotary_percent < 1 else ""
    biases = "biases for queries, keys and values only" if model.qkv_bias else "no biases"
    kinds = {
        model.normalization: model.normalization != "LayerNorm",
        "SwiGLU": model.swiglu,
        "GEGLU": model.geglu,
        f"rotary positions (base {model.rotary_base:,.0f}{scaling}{share})": model.has_rotary_embedding,
        "relative positions": model.has_relative_positions,
        "no positions": model.position_embedding_type == "none",
        "normalized queries and keys": model.qk_layernorm,
        biases: not model.linear_bias,
        "an output layer of its own": model.untie_embeddings_and_output_weights,
    }
    return [kind for kind, is_present in kinds.items() if is_present]


def _layers(model: ModelConfig) -> str:
    if images := model.vision_layers:
        return f"{counted(model.num_layers - images, 'layer')} after {images} of {model.vision_encoder}"
    if not model.encoder_num_layers:
        return counted(model.num_layers, "layer")
    return f"{model.encoder_num_layers} layers of the encoder and {model.decoder_num_layers} of the decoder"


def _heads(model: ModelConfig) -> str:
    """The number of heads; also their size if it is not hidden size / heads, and the query groups of GQA."""
    heads, groups = model.num_attention_heads, model.query_groups
    size = f" of {model.head_size}" if model.head_size * heads != model.hidden_size else ""
    return f"{counted(heads, 'head')}{size}" + (f" in {counted(groups, 'query group')}" if groups != heads else "")


def _experts(model: ModelConfig) -> dict[str, str]:
    """The line about experts, if the model has any. Parameters are counted only if the vocabulary size is known."""
    if not model.has_experts:
        return {}
    shared = f", and one of {model.moe_shared_expert_intermediate_size} for all tokens"
    text = (
        f"{model.moe_router_topk} of {model.num_experts} for each token, of {model.expert_size}"
        f"{shared if model.moe_shared_expert_intermediate_size else ''}"
        f"{_expert_layers(model.moe_layer_freq)}"
    )
    if not model.padded_vocab_size:
        return {"experts": text}
    total, active = parameter_counts(model)[0], active_parameters(model)
    return {"experts": f"{text}: {active:,} of {total:,} parameters active, {active / total:.2%}"}


def _images(model: ModelConfig) -> dict[str, str]:
    """The line about images, if the model has a vision encoder."""
    if not model.vision_num_layers:
        return {}
    side, parts = model.vision_image_size // model.vision_patch_size, counted(model.image_tokens, "token")
    frozen = f"; not trained: {', '.join(model.frozen_parts)}" if model.frozen_parts else ""
    return {
        "images": f"{model.vision_image_size} pixels, {side} x {side} patches, {parts} of the text each; "
        f"{counted(model.image_slots, 'slot')} in a micro-batch{frozen}"
    }


def _expert_layers(layer_freq: int | str) -> str:
    if isinstance(layer_freq, str):
        return f", in layers {layer_freq}"
    return f", in every {layer_freq} layers" if layer_freq > 1 else ""


def _adapters(model: ModelConfig) -> dict[str, str]:
    """The line about LoRA adapters, if the model has any. Parameters are counted only if the vocabulary is known."""
    if not model.lora_rank:
        return {}
    text = f"rank {model.lora_rank}, alpha {model.lora_alpha:g}, on {', '.join(model.adapted)}"
    if not model.padded_vocab_size:
        return {"adapters": text}
    total, trained = parameter_counts(model)
    return {"adapters": f"{text}: {trained:,} of {total:,} parameters trained, {trained / total:.2%}"}


def describe_stages(run: RunConfig) -> str:
    """A table of the pipeline stages: layers, parameters and share of the forward FLOPs."""
    stages = plan(run)
    stage_flops = [stage.flops(run.data.seq_length) for stage in stages]
    rows = [("stage", "holds", "parameters", "forward FLOPs")]
    for index, (stage, flops) in enumerate(zip(stages, stage_flops, strict=True)):
        layers = " and ".join(_chunk(chunk, run.model.num_layers) for chunk in stage.chunks)
        rows.append((str(index), layers, f"{stage.parameters:,}", f"{flops / sum(stage_flops):.1%}"))
    number, holds, parameters, share = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"> {a:>{number}}  {b:{holds}}  {c:>{parameters}}  {d:>{share}}" for a, b, c, d in rows]
    imbalance = [
        f"{max(costs) * len(costs) / sum(costs):.2f}" for costs in ([stage.parameters for stage in stages], stage_flops)
    ]
    return "\n".join([*lines, f"> largest stage over the mean: parameters {imbalance[0]}, FLOPs {imbalance[1]}"])


def _batch_steps(train: TrainConfig) -> str:
    """The phases of a varying batch size, each with its first iteration; if there are many, the first and the last."""
    if not train.batches.varies:
        return ""
    phases = list(train.batches.phases(0, train.train_iters))
    texts = [
        f"{phase.size:,} from iteration {phase.finished + 1:,} (sample {phase.first_sample:,})" for phase in phases
    ]
    return f"; batches of {', '.join([*texts[:4], '...', texts[-1]] if len(texts) > 6 else texts)}"


def _data(data: DataConfig) -> str:
    blends = {name: _blend(parts) for name, parts in data.blends.items() if parts}
    if data.mock_data:
        return f"mock data, split {data.split}"
    if data.is_split:
        return f"{blends['train']}, split {data.split}" if blends else "none named by flags"
    return "; ".join(f"{name} {blend}" for name, blend in blends.items())


def _blend(parts: Sequence[Part]) -> str:
    if len(parts) == 1:
        return parts[0].prefix
    return ", ".join(f"{float(part.share):.2%} {part.prefix}" for part in parts)


def _chunk(chunk: range, layers: int) -> str:
    """The layers of a model chunk as text, such as ``embeddings, layers 1-3``."""
    numbers = [number for number in chunk if 1 <= number <= layers]
    parts = ["embeddings"] if 0 in chunk else []
    if numbers:
        parts.append(f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}")
    return ", ".join([*parts, "head"] if layers + 1 in chunk else parts)


def _attention(run: RunConfig, device: DeviceFacts) -> dict[str, str]:
    """The line about the attention kernel; none for a user-provided model."""
    if architecture_of(run.model).provider:
        return {}
    causal = architecture_of(run.model).is_causal
    kernel = attention_kernel(run.model, device, causal=causal, seq_length=run.data.seq_length)
    if (ring := run.parallel.ring_size) == 1:
        return {"attention": kernel.summary}
    name = "flash" if kernel.name == "flash" else "plain"
    keys = f"keys and values of one of {ring} ranks at a time, documents and windows in blocks"
    return {"attention": f"{name} ({run.model.dtype}, head dim {run.model.head_size}, {keys})"}


def _fp8(run: RunConfig) -> dict[str, str]:
    """The line about FP8, if it is enabled: which linear layers use it, and what stays in bf16."""
    model, t = run.model, run.parallel.model_parallel_size
    if model.fp8_format == "none" or architecture_of(model).provider:
        return {}
    blocks = [layer for layer in architecture_of(model).layers(model) if layer.is_block]
    quantized = dict.fromkeys(weight.name for layer in blocks for weight in fp8_weights(model, layer, t))
    weights = [weight for layer in blocks for weight in linear_weights(layer)]
    others = {weight.name: weight.shape for weight in weights if weight.name not in quantized}
    names = ", ".join(name.removesuffix(".weight") for name in quantized) or "no layer"
    sizes = [f"{name.removesuffix('.weight')} {list(shape)}" for name, shape in others.items()]
    kinds = {"experts, router": model.has_experts, "adapters": model.lora_rank > 0}
    others_in_bf16 = [kind for kind, is_present in kinds.items() if is_present]
    rest = ", ".join([*sizes, "embeddings, head, gradients of weights", *others_in_bf16])
    return {"fp8": f"{model.fp8_format}, {model.fp8_recipe}: {names}; in bf16: {rest}"}


def _mlp(model: ModelConfig) -> str:
    if model.tiled_mlp:
        return ", the MLP in tiles"
    return ", the MLP's recomputed" if model.recompute_mlp_activation else ""


def _recomputed(run: RunConfig) -> str:
    if not run.activation.checkpoint_activations:
        return "activations kept"
    if run.activation.recompute_granularity == "selective":
        return "attention cores recomputed"
    layers = run.activation.checkpoint_num_layers
    return f"activations recomputed every {'layer' if layers == 1 else f'{layers} layers'}"
