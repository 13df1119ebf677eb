"""The rules that compare several settings of a run: each returns the message for a run that breaks it, else None.

A check is silent where a size it needs is missing or out of range, for that is reported by itself.
"""

import math
from importlib.util import find_spec

from megatron.config import RunConfig


def _divides(small: int, large: int) -> bool:
    """Whether ``small`` divides ``large``; also if either is no size at all, which is another rule's business."""
    return small < 1 or large < 1 or large % small == 0


def hidden_size(run: RunConfig) -> str | None:
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if not _divides(heads, hidden):
        return f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: {_nearest(hidden, heads)}"
    return None


def heads(run: RunConfig) -> str | None:
    heads, ranks = run.model.num_attention_heads, run.parallel.model_parallel_size
    if not _divides(ranks, heads):
        return (
            f"--num-attention-heads {heads} is not a multiple of --model-parallel-size {ranks}: "
            f"{_nearest(heads, ranks)}"
        )
    return None


def ffn_hidden_size(run: RunConfig) -> str | None:
    size, ranks = run.model.ffn_hidden_size, run.parallel.model_parallel_size
    if not _divides(ranks, size):
        return f"--ffn-hidden-size {size} is not a multiple of --model-parallel-size {ranks}: {_nearest(size, ranks)}"
    return None


def sequence_parallel(run: RunConfig) -> str | None:
    if run.parallel.sequence_parallel and run.parallel.model_parallel_size == 1:
        return "--sequence-parallel has no effect with --model-parallel-size 1: use 2 or more, or remove it"
    return None


def sequence_length(run: RunConfig) -> str | None:
    tokens, parallel, cuts = run.data.seq_length, run.parallel, []
    if parallel.ds_sequence_parallel_size > 1:
        cuts.append(("--ds-sequence-parallel-size", parallel.ds_sequence_parallel_size))
    if parallel.sequence_parallel:
        cuts.append(("--sequence-parallel's --model-parallel-size", parallel.model_parallel_size))
    parts = math.prod(size for _, size in cuts)
    if not _divides(parts, tokens):
        product = " x ".join(f"{name} {size}" for name, size in cuts)
        return f"--seq-length {tokens} is not a multiple of {product}: {_nearest(tokens, parts)}"
    return None


def sequence_heads(run: RunConfig) -> str | None:
    heads, tensor, ranks = (
        run.model.num_attention_heads,
        run.parallel.model_parallel_size,
        run.parallel.ds_sequence_parallel_size,
    )
    if ranks > 1 and tensor >= 1 and _divides(tensor, heads) and not _divides(tensor * ranks, heads):
        product = f"--ds-sequence-parallel-size {ranks}"
        if tensor > 1:
            product += f" x --model-parallel-size {tensor}"
        return f"--num-attention-heads {heads} is not a multiple of {product}: {_nearest(heads, tensor * ranks)}"
    return None


def ulysses_with_pipeline(run: RunConfig) -> str | None:
    if run.parallel.ds_sequence_parallel_size > 1 and run.parallel.uses_pipeline:
        return (
            f"--ds-sequence-parallel-size {run.parallel.ds_sequence_parallel_size} cannot go with "
            f"--pipe-parallel-size {run.parallel.pipe_parallel_size}: DeepSpeed's pipeline has no axis for it; use "
            "--pipe-parallel-size 0, or --sequence-parallel with --model-parallel-size"
        )
    return None


def _nearest(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"use {below} or {below + factor}" if below else f"use {factor}"


def positions(run: RunConfig) -> str | None:
    tokens, positions = run.data.seq_length, run.model.max_position_embeddings
    if tokens > positions > 0:
        return f"--seq-length {tokens} is more than --max-position-embeddings {positions}: raise the latter"
    return None


def world_size(run: RunConfig) -> str | None:
    world, tensor, stages = run.parallel.world_size, run.parallel.model_parallel_size, run.parallel.pipe_stages
    parts, replica = run.parallel.ds_sequence_parallel_size, run.parallel.replica_size
    if replica < 1 or world % replica == 0:
        return None
    below = world // replica * replica
    remedies = [f"{below} or {below + replica} processes" if below else f"{replica} processes"]
    heads = run.model.num_attention_heads
    sizes = [n for n in range(1, world + 1) if world % (n * stages * parts) == 0 and _divides(n * parts, heads)]
    if sizes:
        remedies.append(f"--model-parallel-size {_either(sizes)}")
    grid = f"--model-parallel-size {tensor}"
    if run.parallel.uses_pipeline:
        grid += f" x --pipe-parallel-size {stages}"
        depths = [n for n in range(1, world + 1) if world % (n * tensor * parts) == 0 and n <= run.model.num_layers]
        if depths:
            remedies.append(f"--pipe-parallel-size {_either(depths)}")
    if parts > 1:
        grid += f" x --ds-sequence-parallel-size {parts}"
        shares = [n for n in range(1, world + 1) if world % (n * tensor * stages) == 0 and _divides(n * tensor, heads)]
        if shares:
            remedies.append(f"--ds-sequence-parallel-size {_either(shares)}")
    unit = "process" if world == 1 else "processes"
    return f"{world} {unit} cannot be split into {grid}: use {', or '.join(remedies)}"


def _either(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def zero_with_pipeline(run: RunConfig) -> str | None:
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        return (
            f"--zero-stage {stage} cannot go with --pipe-parallel-size {stages}: the pipeline accumulates gradients "
            "over micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0"
        )
    return None


def half_precision_norm(run: RunConfig) -> str | None:
    if run.precision.dtype != "fp32" and run.zero.zero_stage == 0 and run.parallel.model_parallel_size > 1:
        return (
            f"--{run.precision.dtype} with --model-parallel-size {run.parallel.model_parallel_size} at --zero-stage 0 "
            "would clip by the gradient norm of one rank: use --zero-stage 1"
        )
    return None


def bf16_master_weights(run: RunConfig) -> str | None:
    parallel, precision = run.parallel, run.precision
    plain = not parallel.uses_pipeline and parallel.model_parallel_size == 1  # with more, another rule is against it
    if precision.bf16 and not precision.fp16 and run.zero.zero_stage == 0 and plain:
        return "--bf16 at --zero-stage 0 would keep no fp32 copy of the weights: use --zero-stage 1"
    return None


def device_precision(run: RunConfig) -> str | None:
    if run.precision.fp16 and run.parallel.device == "cpu":
        return "--fp16 does not work on the CPU: use --bf16, or neither for fp32"
    return None


def backend(run: RunConfig) -> str | None:
    if run.parallel.distributed_backend == "nccl" and run.parallel.device == "cpu":
        return "--distributed-backend nccl needs GPUs, and this host shows none: use gloo, or leave it out"
    return None


def initial_loss_scale(run: RunConfig) -> str | None:
    scale = run.precision.initial_loss_scale
    if scale >= 1 and not math.log2(scale).is_integer():
        power = 2 ** round(math.log2(scale))
        return f"--initial-loss-scale {scale:g} is not a power of two: use {power}"
    return None


def min_scale(run: RunConfig) -> str | None:
    if run.precision.min_scale != int(run.precision.min_scale):
        return f"--min-scale {run.precision.min_scale:g} is not a whole number: use {round(run.precision.min_scale)}"
    return None


def hysteresis(run: RunConfig) -> str | None:
    precision, stage = run.precision, run.zero.zero_stage
    if precision.fp16 and stage == 0 and precision.hysteresis > 2:
        return (
            f"--hysteresis {precision.hysteresis} has no effect at --zero-stage 0, where each overflow halves the loss "
            "scale: use --zero-stage 1, or remove it"
        )
    return None


def apex(run: RunConfig) -> str | None:
    if run.model.fused_kernels != "apex":
        return None
    if run.parallel.device == "cpu":
        return "--fused-kernels apex needs CUDA, and this host shows no GPU: use auto or torch"
    if find_spec("apex") is None:
        return "--fused-kernels apex: apex is not installed; install it, or use auto or torch"
    return None


def fused_attention(run: RunConfig) -> str | None:
    model = run.model
    rivals = {
        "--attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        "--apply-query-key-layer-scaling": model.apply_query_key_layer_scaling,
        "--reset-attention-mask": model.reset_attention_mask,
        f"--pre-tokens {model.pre_tokens}": model.pre_tokens < run.data.seq_length - 1,
    }
    said = [name for name, on in rivals.items() if on]
    if model.scaled_upper_triang_masked_softmax_fusion and said:
        return f"--scaled-upper-triang-masked-softmax-fusion rules out {' and '.join(said)}: remove one side"
    return None


def loss_normalization(run: RunConfig) -> str | None:
    if run.train.loss_normalization == "micro-batch" and not run.data.eod_mask_loss:
        return "--loss-normalization micro-batch has no effect without --eod-mask-loss: add it, or remove the former"
    return None


def spike_factor(run: RunConfig) -> str | None:
    train = run.train
    if train.spike_factor != type(train)().spike_factor and not train.rewind_on_spike:
        return "--spike-factor has no effect without --rewind-on-spike: add --rewind-on-spike, or remove --spike-factor"
    return None


def min_lr(run: RunConfig) -> str | None:
    if run.optim.lr > 0 and run.optim.min_lr > run.optim.lr:
        return f"--min-lr {run.optim.min_lr:g} is more than --lr {run.optim.lr:g}: lower it"
    return None


def warmup(run: RunConfig) -> str | None:
    optim, train = run.optim, run.train
    if train.global_batch_size < 1 or optim.decay_iters(train) < 1:
        return None
    warmup, decay = optim.warmup_iters(train), optim.decay_iters(train)
    if warmup > decay:
        return f"the warm-up of {warmup} iterations is longer than the decay of {decay}: shorten it"
    last = optim.lr_wsd_decay_iters or 0
    if optim.lr_decay_style == "WSD" and warmup + last > decay:
        return (
            f"the warm-up of {warmup} iterations and --lr-wsd-decay-iters {last} do not fit into {decay} iterations: "
            "shorten one"
        )
    return None


def wsd(run: RunConfig) -> str | None:
    if run.optim.lr_decay_style == "WSD" and run.optim.lr_wsd_decay_iters is None:
        return "--lr-decay-style WSD needs --lr-wsd-decay-iters"
    if run.optim.lr_decay_style != "WSD" and run.optim.lr_wsd_decay_iters is not None:
        return "--lr-wsd-decay-iters has no effect without --lr-decay-style WSD: add it, or remove the former"
    return None


def merges(run: RunConfig) -> str | None:
    if run.data.tokenizer_type == "GPT2BPETokenizer" and run.data.merge_file is None:
        return "--merge-file is required with --tokenizer-type GPT2BPETokenizer"
    return None


def recomputed_layers(run: RunConfig) -> str | None:
    if run.activation.checkpoint_num_layers > 1 and not run.activation.checkpoint_activations:
        return "--checkpoint-num-layers has no effect without --checkpoint-activations: add it, or remove the former"
    return None


def selective_recomputation(run: RunConfig) -> str | None:
    activation = run.activation
    asked = {
        "--partition-activations": activation.partition_activations,
        f"--checkpoint-num-layers {activation.checkpoint_num_layers}": activation.checkpoint_num_layers > 1,
    }
    said = [name for name, on in asked.items() if on]
    if activation.recompute_granularity == "selective" and said:
        return f"{' and '.join(said)} cannot go with --recompute-granularity selective: use full, or remove the former"
    return None


def partitioned_sequence(run: RunConfig) -> str | None:
    if run.parallel.sequence_parallel and run.activation.partition_activations:
        return (
            "--partition-activations cannot go with --sequence-parallel, by which each rank keeps a part of the "
            "sequence already: remove one"
        )
    return None


def partitioned_activations(run: RunConfig) -> str | None:
    activation = run.activation
    asked = {
        "--contigious-checkpointing": activation.contigious_checkpointing,
        "--checkpoint-in-cpu": activation.checkpoint_in_cpu,
    }
    said = [name for name, on in asked.items() if on]
    if said and not activation.partition_activations:
        return f"{' and '.join(said)} cannot work without --partition-activations: add it"
    return None


def half_precision_residual(run: RunConfig) -> str | None:
    if run.model.fp32_residual_connection and run.precision.dtype == "fp32":
        return "--fp32-residual-connection has no effect in fp32: add --bf16 or --fp16, or remove it"
    return None


def half_precision_loss(run: RunConfig) -> str | None:
    if run.model.fp16_lm_cross_entropy and run.precision.dtype == "fp32":
        return "--fp16-lm-cross-entropy has no effect in fp32: add --bf16 or --fp16, or remove it"
    return None


def offloaded_optimizer(run: RunConfig) -> str | None:
    device = run.zero.offload_optimizer
    if device == "cpu" and run.zero.zero_stage == 0:
        return f"--offload-optimizer {device} needs ZeRO, which partitions what is offloaded: add --zero-stage 1"
    return None


def optimizer_on_nvme(run: RunConfig) -> str | None:
    if run.zero.offload_optimizer == "nvme" and run.zero.zero_stage < 3:
        return "--offload-optimizer nvme works at ZeRO 3 only: use --zero-stage 3, or --offload-optimizer cpu"
    return None


def offloaded_param(run: RunConfig) -> str | None:
    device = run.zero.offload_param
    if device != "none" and run.zero.zero_stage < 3:
        return f"--offload-param {device} works at ZeRO 3 only: use --zero-stage 3, or remove it"
    return None


def nvme_path(run: RunConfig) -> str | None:
    if run.zero.uses_nvme and run.zero.nvme_path is None:
        return "what is offloaded to nvme needs a folder on that device: add --nvme-path"
    if run.zero.nvme_path is not None and not run.zero.uses_nvme:
        return (
            "--nvme-path has no effect without --offload-optimizer nvme or --offload-param nvme: add one, or remove it"
        )
    return None


def offload_settings(run: RunConfig) -> str | None:
    zero = run.zero
    if zero.cpu_torch_adam and not zero.offloads_optimizer:
        return "--cpu-torch-adam has no effect without --offload-optimizer: add it, or remove the former"
    if not zero.offload_pin_memory and not zero.offloads_optimizer and zero.offload_param == "none":
        return "--no-offload-pin-memory has no effect without --offload-optimizer or --offload-param: remove it"
    return None


def overlap_comm(run: RunConfig) -> str | None:
    if run.zero.zero_overlap_comm and run.parallel.uses_pipeline:
        return (
            "--zero-overlap-comm does not work in a pipeline, which reduces gradients behind its last micro-batch: "
            "remove it, or use --pipe-parallel-size 0"
        )
    if run.zero.zero_overlap_comm and run.zero.zero_stage == 0:
        return "--zero-overlap-comm has no effect without ZeRO: add --zero-stage 1, or remove it"
    return None


def round_robin_gradients(run: RunConfig) -> str | None:
    if run.zero.zero_round_robin_gradients and run.zero.zero_stage not in (1, 2):
        return (
            f"--zero-round-robin-gradients has no effect at --zero-stage {run.zero.zero_stage}: use --zero-stage 1 or "
            "2, or remove it"
        )
    return None


def grad_accum_dtype(run: RunConfig) -> str | None:
    accumulated, dtype = run.precision.grad_accum_dtype, run.precision.dtype
    if accumulated is None:
        return None
    if dtype == "fp32":
        return f"--grad-accum-dtype {accumulated} is for half precision, and weights are fp32: add --bf16, or remove it"
    if accumulated not in ("fp32", dtype):
        return f"--grad-accum-dtype {accumulated} cannot go with --{dtype}: use --grad-accum-dtype fp32"
    if accumulated == "fp32" and run.zero.zero_stage == 0:
        return "--grad-accum-dtype fp32 needs ZeRO, which keeps the sum: use --zero-stage 1"
    return None


def on_save_error(run: RunConfig) -> str | None:
    if run.checkpoint.on_save_error != "stop" and run.checkpoint.save is None:
        return "--on-save-error has no effect without --save: add --save, or remove it"
    return None


def load_strict(run: RunConfig) -> str | None:
    if run.checkpoint.load_strict and run.checkpoint.load is None and not run.checkpoint.auto_resume:
        return "--load-strict has no effect without --load or --auto-resume: add one, or remove it"
    return None
