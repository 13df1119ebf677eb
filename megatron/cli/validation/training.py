"""Rules about devices, precision, ZeRO, the optimizer, batch sizes, learning rate, data and output."""

import math
from importlib.util import find_spec

from megatron.cli.validation.rules import Messages, enabled, rule
from megatron.common.errors import counted, nearest_multiples
from megatron.common.tokenizer_files import NULL_TOKENIZER, PUBLISHED, unused_merges
from megatron.config import RunConfig
from megatron.config.data import read_blend
from megatron.config.output import steps
from megatron.model.architectures import architecture_of


@rule(otherwise="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism")
def zero_with_pipeline(run: RunConfig) -> Messages:
    """The pipeline runs at ZeRO 0 or 1.

    It accumulates gradients over micro-batches, and would have to reduce sharded gradients for each micro-batch.
    """
    stage, stages = run.zero.zero_stage, run.parallel.pipe_parallel_size
    if run.parallel.uses_pipeline and stage >= 2:
        yield (
            f"--zero-stage {stage} cannot be combined with --pipe-parallel-size {stages}: the pipeline accumulates "
            "gradients, and would have to reduce its shards for each micro-batch; use --zero-stage 1 or "
            "--pipe-parallel-size 0 (docs/parallelism.md, ZeRO 2 with a pipeline, compares their memory)"
        )


@rule(only_warns=True)
def overlaps(run: RunConfig) -> Messages:
    """Gradients and weights are communicated during passes only if they are ready by then.

    With --tiled-mlp a weight gets several gradients in a backward pass, with zbh1 and zbv it gets them after the pass.
    An offloaded optimizer updates the weights on the CPU, and in a pipeline DeepSpeed reduces its gradients at once.
    """
    zero, schedule = run.zero, run.parallel.pipeline_schedule
    if zero.zero_overlap_comm and zero.zero_stage < 3 and not run.overlaps_grad_reduce:
        offload = "--offload-optimizer in a pipeline" if zero.offloads_optimizer else f"--pipeline-schedule {schedule}"
        other = "--tiled-mlp" if run.model.tiled_mlp else offload
        yield f"--overlap-grad-reduce has no effect with {other}: gradients are reduced after the backward pass"
    if zero.overlap_param_gather and zero.offloads_optimizer:
        yield "--overlap-param-gather has no effect with --offload-optimizer: weights are gathered after the step"


@rule()
def loss_scales(run: RunConfig) -> Messages:
    """Initial loss scales are powers of two, minimum scales integers. DeepSpeed stores an exponent and an integer."""
    first, least = run.precision.initial_loss_scale, run.precision.min_scale
    if first >= 1 and not math.log2(first).is_integer():
        yield f"--initial-loss-scale {first:g} is not a power of two: use {2 ** round(math.log2(first))}"
    if least != int(least):
        yield f"--min-scale {least:g} is not an integer: use {round(least)}"


@rule(otherwise="ValueError: Type fp16 is not supported on your device.")
def gpus(run: RunConfig) -> Messages:
    """fp16, NCCL and apex need GPUs. On the CPU, bf16, gloo and torch's own kernels run."""
    needs_apex = run.model.fused_kernels == "apex"
    settings = {
        "--fp16": run.precision.fp16,
        "--distributed-backend nccl": run.parallel.distributed_backend == "nccl",
        "--fused-kernels apex": needs_apex,
    }
    if run.parallel.device == "cpu" and (given := enabled(settings)):
        yield f"{given} needs CUDA, and this run is on {run.parallel.device}: remove it"
    if needs_apex and find_spec("apex") is None:
        yield "--fused-kernels apex: apex is not installed; install it, or use auto or torch"


@rule()
def provided_model(run: RunConfig) -> Messages:
    """A user's own model (of pretrain) has no list of layers.

    Adapters, experts, Muon, plans and published weights need to know the layers and their matrices.
    """
    settings = {
        "--lora-rank": run.model.lora_rank > 0,
        "--num-experts": run.model.has_experts,
        "--optimizer muon": run.optim.optimizer == "muon",
        "--load-hf": run.checkpoint.load_hf is not None,
        "--dry-run": run.logging.dry_run,
        "--run-dir": run.observe.run_dir is not None,
    }
    if architecture_of(run.model).provider is not None and (given := enabled(settings)):
        yield f"{given}: the model of {run.model.architecture} has no list of layers, which this needs: remove it"


_WATCHDOG_MINUTES = 0.5
"""Maximum time in minutes from the watchdog's limit to the end of the last rank."""


@rule()
def watchdog_before_timeout(run: RunConfig) -> Messages:
    """--watchdog-minutes ends a hung run before its collectives time out.

    Otherwise the backend ends it first, NCCL by aborting the process, and no rank is named.
    """
    watchdog, timeout = run.logging.watchdog_minutes, run.parallel.distributed_timeout_minutes
    if watchdog is not None and timeout < watchdog + _WATCHDOG_MINUTES:
        yield (
            f"--watchdog-minutes {watchdog:g} is too late for collectives that time out after {timeout:g} minutes: use "
            f"--distributed-timeout-minutes {watchdog + _WATCHDOG_MINUTES:g} or more, or a smaller limit"
        )


@rule(otherwise="computes a different update on each layout")
def adafactor(run: RunConfig) -> Messages:
    """Adafactor runs without ZeRO and tensor parallelism.

    Its state consists of row and column sums of full matrices, and its step depends on the norm of a full matrix.
    """
    remedies = {
        "--zero-stage 0": run.zero.zero_stage > 0 and run.precision.dtype == "fp32",
        "fp32 at --zero-stage 0": run.zero.zero_stage > 0 and run.precision.dtype != "fp32",
        "--model-parallel-size 1": run.parallel.model_parallel_size > 1,
    }
    if run.optim.optimizer == "adafactor" and (needed := enabled(remedies)):
        yield f"--optimizer adafactor needs full matrices on each rank: use {needed}, or --optimizer adam"


@rule()
def min_lr(run: RunConfig) -> Messages:
    """--min-lr is at most --lr. The learning rate decays from --lr to --min-lr."""
    if run.optim.lr > 0 and run.optim.min_lr > run.optim.lr:
        yield f"--min-lr {run.optim.min_lr:g} is more than --lr {run.optim.lr:g}: lower it"


@rule(otherwise="ValueError: Train batch size must be divisible by micro-batch data parallelism")
def batch_sizes(run: RunConfig) -> Messages:
    """Every batch size is a multiple of micro-batch x DP.

    A varying batch size changes the number of micro-batches, not their size.
    """
    train = run.train
    for _, size in train.batch_steps:
        ranks = run.parallel.data_parallel_size
        unit = train.micro_batch_size * ranks
        if size % unit:
            flag = "--rampup-batch-size" if train.rampup_batch_size else "--step-batch-size-schedule"
            yield (
                f"a global batch of {size} is not a multiple of --batch-size {train.micro_batch_size} x data-parallel "
                f"size {ranks} = {unit}: change {flag} so that it is {nearest_multiples(size, unit)}, or lower "
                "--batch-size"
            )


@rule()
def warmup(run: RunConfig) -> Messages:
    """Warm-up fits into the decay. Both are counted in the same unit."""
    optim, train = run.optim, run.train
    if train.global_batch_size < 1 or optim.decay_steps(train) < 1 or optim.lr_warmup_fraction > 1:
        return
    warmup, decay, unit = optim.warmup_steps(train), optim.decay_steps(train), train.lr_unit
    if warmup > decay:
        given = {"--lr-warmup-iters": optim.lr_warmup_iters, "--lr-warmup-samples": optim.lr_warmup_samples}
        flag = next((flag for flag, value in given.items() if value is not None), "--warmup")
        yield f"the warm-up of {warmup} {unit}s is longer than the decay of {decay}: lower {flag}"
    last = optim.wsd_decay_steps(train) or 0
    if optim.lr_decay_style == "WSD" and warmup + last > decay:
        flag = "--lr-wsd-decay-samples" if optim.lr_wsd_decay_samples else "--lr-wsd-decay-iters"
        yield f"the warm-up of {warmup} {unit}s and {flag} {last} do not fit into {decay} {unit}s: shorten one"


@rule()
def tokenizer(run: RunConfig) -> Messages:
    """The tokenizer has the special tokens of the model.

    GPT-2 needs an end-of-document token; BERT needs tokens that frame, pad and mask.
    """
    data, model = run.data, architecture_of(run.model)
    if model.provider is not None:
        return
    is_null = data.tokenizer_type == NULL_TOKENIZER
    suits = is_null and (data.mock_data or not model.masked_lm or model.is_encoder_decoder)
    if not suits and data.tokenizer_type not in model.tokenizers:
        instead = " or ".join(model.tokenizers)
        mock = ", or add --mock-data" if is_null else ""
        yield f"--tokenizer-type {data.tokenizer_type} does not suit {run.model.architecture}: use {instead}{mock}"


@rule()
def merges(run: RunConfig) -> Messages:
    """BPE needs merges. The vocabulary does not determine how text is tokenized."""
    data = run.data
    if data.tokenizer_type == "GPT2BPETokenizer" and data.merge_file is None and _needs_tokenizer(run):
        suits = "WhitespaceTokenizer" in architecture_of(run.model).tokenizers
        other = "; for a vocabulary of words use --tokenizer-type WhitespaceTokenizer" if suits else ""
        yield f"--merge-file is required with --tokenizer-type GPT2BPETokenizer{other}"


@rule(only_warns=True)
def merges_of_words(run: RunConfig) -> Messages:
    """--merge-file is for a tokenizer with merges.

    Command lines for Megatron-LM give --merge-file with any tokenizer.
    """
    yield from unused_merges(run.data.tokenizer_type, run.data.merge_file)


@rule()
def tokenizer_files(run: RunConfig) -> Messages:
    """A tokenizer has a vocabulary. NullTokenizer needs only its size, the others a file."""
    data = run.data
    if data.tokenizer_type != NULL_TOKENIZER and data.vocab_file is None and _needs_tokenizer(run):
        if data.tokenizer_type in PUBLISHED:
            yield f"--tokenizer-model is required with --tokenizer-type {data.tokenizer_type}"
        yield "--vocab-file is required"


def _needs_tokenizer(run: RunConfig) -> bool:
    """Whether a tokenizer with files is needed: a user's own model may run without."""
    return run.data.vocab_file is not None or architecture_of(run.model).provider is None


@rule()
def pairs(run: RunConfig) -> Messages:
    """A pair of sentences fits into a sample. BERT's samples are pairs of sentences with three special tokens."""
    tokens = run.data.seq_length
    architecture = architecture_of(run.model)
    if architecture.masked_lm and not architecture.is_encoder_decoder and 0 < tokens < 5:
        yield f"--seq-length {tokens} is too short for [CLS] and two tokens with a [SEP] after each: use 5 or more"


@rule()
def blends(run: RunConfig) -> Messages:
    """A blend has a weight before each prefix.

    The share of each data set is its weight divided by the sum of all weights.
    """
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            if blend := getattr(run.data, name):
                read_blend(tuple(blend))
        except ValueError as error:
            yield f"--{name.replace('_', '-')} {' '.join(blend)}: {error}"


@rule()
def step_ranges(run: RunConfig) -> Messages:
    """Traced and profiled iterations are iterations of the run. Otherwise the output would be empty."""
    observe, last = run.observe, run.train.train_iters
    for flag, text in (("--trace-steps", observe.trace_steps), ("--profile-steps", observe.profile_steps)):
        if text is None or (flag == "--trace-steps" and observe.trace is None):
            continue
        if not steps(text):
            yield f"{flag} {text}: give the first iteration and the last, such as 2:4"
        elif 0 < last < steps(text)[0]:
            yield f"{flag} {text} begins after the last iteration, {last}: choose earlier ones"
    if last > 0 and (observe.flops_profile_step or 0) > last:
        yield f"--flops-profile-step {observe.flops_profile_step} is after the last iteration, {last}: choose another"


@rule()
def dry_ranks(run: RunConfig) -> Messages:
    """--rank names ranks of the run. Other ranks have no layers to build."""
    world = run.parallel.world_size
    try:
        ranks = run.logging.ranks or []
    except ValueError:
        yield f"--rank {run.logging.rank} is not a list of numbers: give one such as 0,513"
        return
    beyond = [rank for rank in ranks if not 0 <= rank < world]
    if beyond:
        processes = f"{'is' if world == 1 else 'are'} {counted(world, 'process')}"
        yield f"--rank {beyond[0]}: there {processes}, counted from 0; lower it, or raise --world-size"
