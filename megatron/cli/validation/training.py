"""Rules about devices, precision, ZeRO, the optimizer, batch sizes and learning rate."""

import math
from importlib.util import find_spec

from megatron.cli.validation.rules import Messages, enabled, rule
from megatron.common.errors import nearest_multiples
from megatron.config import RunConfig
from megatron.model.architectures import architecture_of


@rule(
    "the pipeline runs at ZeRO 0 or 1",
    why="It accumulates gradients over micro-batches, so that sharded gradients would be reduced for each of them.",
    otherwise="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
)
def zero_with_pipeline(run: RunConfig) -> Messages:
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        yield (
            f"--zero-stage {stage} cannot be combined with --pipe-parallel-size {stages}: the pipeline accumulates "
            "gradients over micro-batches, and would have to reduce its shards for each of them; use --zero-stage 1 or "
            "--pipe-parallel-size 0 (docs/parallelism.md, ZeRO 2 with a pipeline, compares their memory)"
        )


@rule(
    "fp16 needs a GPU",
    why="DeepSpeed does not support fp16 on the CPU, where bf16 works without a loss scale.",
    otherwise="ValueError: Type fp16 is not supported on your device.",
)
def device_precision(run: RunConfig) -> Messages:
    if run.precision.fp16 and run.parallel.device == "cpu":
        yield "--fp16 does not work on the CPU: use --bf16, or neither for fp32"


@rule("NCCL and apex need GPUs", why="On the CPU, gloo and torch's own kernels run.")
def gpus(run: RunConfig) -> Messages:
    needs_apex = run.model.fused_kernels == "apex"
    settings = {
        "--distributed-backend nccl": run.parallel.distributed_backend == "nccl" and run.parallel.device == "cpu",
        "--fused-kernels apex": needs_apex and run.parallel.device == "cpu",
    }
    if given := enabled(settings):
        yield f"{given} needs CUDA, and this run is on {run.parallel.device}: remove it"
    if needs_apex and find_spec("apex") is None:
        yield "--fused-kernels apex: apex is not installed; install it, or use auto or torch"


@rule("the initial loss scale is a power of two", why="DeepSpeed stores its exponent.")
def initial_loss_scale(run: RunConfig) -> Messages:
    scale = run.precision.initial_loss_scale
    if scale >= 1 and not math.log2(scale).is_integer():
        power = 2 ** round(math.log2(scale))
        yield f"--initial-loss-scale {scale:g} is not a power of two: use {power}"


@rule("the smallest loss scale is a whole number", why="DeepSpeed stores it as an integer.")
def min_scale(run: RunConfig) -> Messages:
    if run.precision.min_scale != int(run.precision.min_scale):
        yield f"--min-scale {run.precision.min_scale:g} is not a whole number: use {round(run.precision.min_scale)}"


@rule(
    "gradients that stay where the backward pass adds them up have the type of the weights",
    why="They are not copied to another buffer before the end of a step.",
    otherwise="silently accumulates in half precision",
)
def accumulation_in_place(run: RunConfig) -> Messages:
    settings = {
        "--zero-coalesce-grad-reduction": run.zero.zero_coalesce_grad_reduction,
        "--gradient-accumulation-fusion": run.model.gradient_accumulation_fusion,
    }
    in_fp32 = run.precision.grad_accum_dtype == "fp32" != run.precision.dtype
    if in_fp32 and (given := enabled(settings)):
        yield f"{given} cannot be combined with --grad-accum-dtype fp32: remove one"


@rule(
    "coalesced reduction at ZeRO 2 excludes overlapped reduction",
    why="Gradients are reduced when the last backward pass has finished.",
    otherwise="silently reduces them without overlap",
)
def coalesced_without_overlap(run: RunConfig) -> Messages:
    zero = run.zero
    if zero.zero_coalesce_grad_reduction and zero.zero_overlap_comm and zero.zero_stage == 2:
        yield (
            "--zero-coalesce-grad-reduction at --zero-stage 2 leaves nothing to overlap: remove it, or "
            "--zero-overlap-comm"
        )


@rule(
    "a model of another program has no list of layers",
    why="Adapters, experts, Muon, plans and published weights need to know the layers and their matrices.",
)
def provided_model(run: RunConfig) -> Messages:
    settings = {
        "--lora-rank": run.model.lora_rank > 0,
        "--num-experts": run.model.has_experts,
        "--optimizer muon": run.optim.optimizer == "muon",
        "--load-hf": run.checkpoint.load_hf is not None,
        "--dry-run": run.logging.dry_run,
        "--run-dir": run.observe.run_dir is not None,
    }
    if architecture_of(run.model).provider is not None and (given := enabled(settings)):
        yield f"{given}: the model of {run.model.architecture} has no list of layers, which it needs: remove it"


_WATCHDOG_MINUTES = 0.5
"""Longest time from the watchdog's limit to the end of the last rank."""


@rule(
    "--watchdog-minutes ends a hung run before its collectives time out",
    why="Otherwise the backend ends it first, NCCL by aborting the process, and no rank is named.",
)
def watchdog_before_timeout(run: RunConfig) -> Messages:
    watchdog, timeout = run.logging.watchdog_minutes, run.parallel.distributed_timeout_minutes
    if watchdog is not None and timeout < watchdog + _WATCHDOG_MINUTES:
        yield (
            f"--watchdog-minutes {watchdog:g} is too late for collectives that time out after {timeout:g} minutes: use "
            f"--distributed-timeout-minutes {watchdog + _WATCHDOG_MINUTES:g} or more, or a smaller limit"
        )


@rule(
    "the micro-batch average of the loss needs a mask",
    why="Without --eod-mask-loss all micro-batches count the same number of tokens, and both averages are equal.",
)
def loss_normalization(run: RunConfig) -> Messages:
    masks_loss = run.data.eod_mask_loss or run.data.sft or architecture_of(run.model).masked_lm
    if run.train.loss_normalization == "micro-batch" and not masks_loss:
        yield (
            "--loss-normalization micro-batch has no effect without --eod-mask-loss: add it, or remove "
            "--loss-normalization"
        )


@rule(
    "Adafactor runs without ZeRO and tensor parallelism",
    why="Its state is the sums of a full matrix's rows and columns, and its step depends on that matrix's norm.",
    otherwise="computes another update on each layout",
)
def adafactor(run: RunConfig) -> Messages:
    remedies = {
        "--zero-stage 0": run.zero.zero_stage > 0 and run.precision.dtype == "fp32",
        "fp32 at --zero-stage 0": run.zero.zero_stage > 0 and run.precision.dtype != "fp32",
        "--model-parallel-size 1": run.parallel.model_parallel_size > 1,
    }
    if run.optim.optimizer == "adafactor" and (needed := enabled(remedies)):
        yield f"--optimizer adafactor needs full matrices on each rank: use {needed}, or --optimizer adam"


@rule("--min-lr is at most --lr", why="The learning rate decays from --lr to --min-lr.")
def min_lr(run: RunConfig) -> Messages:
    if run.optim.lr > 0 and run.optim.min_lr > run.optim.lr:
        yield f"--min-lr {run.optim.min_lr:g} is more than --lr {run.optim.lr:g}: lower it"


@rule(
    "every batch size is a multiple of micro-batch x DP",
    why="A batch size that varies changes the number of micro-batches; their size stays.",
    otherwise="ValueError: Train batch size must be divisible by micro-batch data parallelism",
)
def batch_sizes(run: RunConfig) -> Messages:
    train = run.train
    for _, size in train.batch_steps:
        ranks = run.parallel.data_parallel_size
        unit = train.micro_batch_size * ranks
        if size % unit:
            yield (
                f"a global batch of {size} is not a multiple of --batch-size {train.micro_batch_size} x data-parallel "
                f"size {ranks} = {unit}: change {_batch_flag(run)} so that it is {nearest_multiples(size, unit)}, or "
                "lower --batch-size"
            )


def _batch_flag(run: RunConfig) -> str:
    return "--rampup-batch-size" if run.train.rampup_batch_size else "--step-batch-size-schedule"


@rule("warm-up fits into the decay", why="Both are counted in the same unit.")
def warmup(run: RunConfig) -> Messages:
    optim, train = run.optim, run.train
    if train.global_batch_size < 1 or optim.decay_steps(train) < 1:
        return
    warmup, decay, unit = optim.warmup_steps(train), optim.decay_steps(train), train.lr_unit
    if warmup > decay:
        yield f"the warm-up of {warmup} {unit}s is longer than the decay of {decay}: shorten it"
    last = optim.wsd_decay_steps(train) or 0
    if optim.lr_decay_style == "WSD" and warmup + last > decay:
        flag = "--lr-wsd-decay-samples" if optim.lr_wsd_decay_samples else "--lr-wsd-decay-iters"
        yield f"the warm-up of {warmup} {unit}s and {flag} {last} do not fit into {decay} {unit}s: shorten one"
