"""The rules about kernels, the loss, the learning rate and checkpoints."""

from importlib.util import find_spec

from megatron.config import RunConfig
from megatron.config.architecture import ARCHITECTURES
from megatron.config.data import read_blend
from megatron.config.output import steps


def backend(run: RunConfig) -> str | None:
    if run.parallel.distributed_backend == "nccl" and run.parallel.device == "cpu":
        return "--distributed-backend nccl needs GPUs, and this host shows none: use gloo, or leave it out"
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
    if run.train.loss_normalization == "micro-batch" and not run.masks_loss:
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


def tokenizer(run: RunConfig) -> str | None:
    known = ARCHITECTURES[run.model.architecture].tokenizers
    if run.data.tokenizer_type not in known:
        return (
            f"--tokenizer-type {run.data.tokenizer_type} is none for {run.model.architecture}: use {' or '.join(known)}"
        )
    return None


def pairs(run: RunConfig) -> str | None:
    tokens = run.data.seq_length
    if ARCHITECTURES[run.model.architecture].masked_lm and 0 < tokens < 5:
        return f"--seq-length {tokens} has no room for [CLS], two tokens and a [SEP] behind each: use 5 or more"
    return None


def merges(run: RunConfig) -> str | None:
    if run.data.tokenizer_type == "GPT2BPETokenizer" and run.data.merge_file is None:
        return "--merge-file is required with --tokenizer-type GPT2BPETokenizer"
    return None


def on_save_error(run: RunConfig) -> str | None:
    if run.checkpoint.on_save_error != "stop" and run.checkpoint.save is None:
        return "--on-save-error has no effect without --save: add --save, or remove it"
    return None


def load_strict(run: RunConfig) -> str | None:
    if run.checkpoint.load_strict and run.checkpoint.load is None and not run.checkpoint.auto_resume:
        return "--load-strict has no effect without --load or --auto-resume: add one, or remove it"
    return None


def dry_ranks(run: RunConfig) -> str | None:
    world = run.parallel.world_size
    try:
        ranks = run.logging.ranks or []
    except ValueError:
        return f"--rank {run.logging.rank} is no list of numbers: write one such as 0,513"
    beyond = [rank for rank in ranks if not 0 <= rank < world]
    if beyond:
        processes = "is 1 process" if world == 1 else f"are {world} processes"
        return f"--rank {beyond[0]}: there {processes}, counted from 0; lower it, or raise --world-size"
    return None


def blends(run: RunConfig) -> str | None:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            if words := getattr(run.data, name):
                read_blend(words)
        except ValueError as error:
            return f"--{name.replace('_', '-')} {' '.join(words)}: {error}"
    return None


def step_ranges(run: RunConfig) -> str | None:
    observe, last = run.observe, run.train.train_iters
    for flag, said in (("--trace-steps", observe.trace_steps), ("--profile-steps", observe.profile_steps)):
        if said is None or (flag == "--trace-steps" and observe.trace is None):
            continue
        if not steps(said):
            return f"{flag} {said}: give the first iteration and the last, such as 2:4"
        if last > 0 and steps(said)[0] > last:
            return f"{flag} {said} begins behind the last iteration, {last}: choose earlier ones"
    if last > 0 and (observe.flops_profile_step or 0) > last:
        return f"--flops-profile-step {observe.flops_profile_step} is behind the last iteration, {last}: choose another"
    return None


def trace_steps(run: RunConfig) -> str | None:
    observe = run.observe
    if observe.trace_steps != type(observe)().trace_steps and observe.trace is None:
        return "--trace-steps has no effect without --trace: add --trace, or remove --trace-steps"
    return None


def profile_folder(run: RunConfig) -> str | None:
    observe = run.observe
    if observe.profiles and observe.profile_dir is None:
        flag = "--profile-steps" if observe.profile_steps else "--flops-profile-step"
        return f"{flag} needs a folder: add --profile-dir, or --trace"
    if not observe.profiles and observe.profile_dir not in (None, observe.trace):
        return "--profile-dir has no effect without --profile-steps or --flops-profile-step: add one, or remove it"
    return None


def flops_on_plain_engine(run: RunConfig) -> str | None:
    if run.observe.flops_profile_step is not None and run.parallel.uses_pipeline:
        return (
            f"--flops-profile-step cannot go with --pipe-parallel-size {run.parallel.pipe_parallel_size}: use "
            "--pipe-parallel-size 0, or look at the forward FLOPs of each stage that --explain prints"
        )
    return None


def repartition_needs_pipeline(run: RunConfig) -> str | None:
    if run.parallel.repartition_from is not None and not run.parallel.uses_pipeline:
        return "--repartition-from has no effect without --pipe-parallel-size: add it, or remove the former"
    return None
