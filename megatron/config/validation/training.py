"""Rules about kernels, loss, learning rate, data, checkpoints, logs and profiles."""

from importlib.util import find_spec

from megatron.config import RunConfig
from megatron.config.data import NULL_TOKENIZER, read_blend, unused_merges
from megatron.config.errors import counted, nearest_multiples
from megatron.config.output import steps
from megatron.config.validation.rules import Messages, enabled, excludes, needs, rule
from megatron.model.architectures import architecture_of


@rule("NCCL needs GPUs", why="On the CPU, gloo is the backend.")
def backend(run: RunConfig) -> Messages:
    if run.parallel.distributed_backend == "nccl" and run.parallel.device == "cpu":
        yield "--distributed-backend nccl needs GPUs, and this host has none: use gloo, or remove it"


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


@rule("--fused-kernels apex needs apex", why="Only auto falls back to torch.")
def apex(run: RunConfig) -> Messages:
    if run.model.fused_kernels != "apex":
        return
    if run.parallel.device == "cpu":
        yield "--fused-kernels apex needs CUDA, and this host has no GPU: use auto or torch"
    if find_spec("apex") is None:
        yield "--fused-kernels apex: apex is not installed; install it, or use auto or torch"


@rule(
    "--compile excludes ZeRO 3",
    why="ZeRO 3 gathers the weights of each module by hooks between the operations that are compiled together.",
    otherwise="recompiles every fragment between two hooks until torch gives up",
)
def compiled_layers(run: RunConfig) -> Messages:
    if run.model.compile and run.zero.zero_stage == 3:
        yield "--compile does not work at --zero-stage 3: use --zero-stage 2, or remove it"


@rule(
    "gradient accumulation fusion needs gradients that stay in place",
    why="It adds the gradient of a micro-batch to that of the micro-batches before it.",
)
def gradients_in_place(run: RunConfig) -> Messages:
    zero = run.zero
    if run.model.gradient_accumulation_fusion and run.train.gradient_accumulation_steps == 1:
        yield (
            "--gradient-accumulation-fusion has no effect with one micro-batch a step: raise --gas or "
            "--global-batch-size, or remove it"
        )
    half_to_fp32 = run.precision.dtype != "fp32" and run.precision.grad_accum_dtype == "fp32"
    remedies = {
        "--zero-stage 1": zero.zero_stage > 1,
        "no --zero-overlap-comm": bool(zero.zero_overlap_comm),
        "no --offload-optimizer": zero.offloads_optimizer,
        "no --grad-accum-dtype fp32": half_to_fp32,
    }
    if run.model.gradient_accumulation_fusion and any(remedies.values()):
        yield (
            "--gradient-accumulation-fusion has no effect if DeepSpeed moves gradients after each micro-batch: "
            f"use {enabled(remedies)}, or remove it"
        )


excludes(
    "model.gradient_accumulation_fusion",
    "model.compile",
    why="torch's compiler cannot see a gradient change that it does not compute.",
)


@rule(
    "the fused causal attention kernel is possible",
    why="It supports the plain causal mask only, and none of the options that change the precision of the scores.",
)
def fused_attention(run: RunConfig) -> Messages:
    model = run.model
    settings = {
        "--attention-softmax-in-fp32": model.attention_softmax_in_fp32,
        "--apply-query-key-layer-scaling": model.apply_query_key_layer_scaling,
        "--reset-attention-mask": model.reset_attention_mask,
        f"--pre-tokens {model.pre_tokens}": model.pre_tokens < run.data.seq_length - 1,
    }
    if model.scaled_upper_triang_masked_softmax_fusion and (rivals := enabled(settings)):
        flag = "--scaled-upper-triang-masked-softmax-fusion"
        yield f"{flag} cannot be combined with {rivals}: remove {flag}, or remove {rivals}"


@rule(
    "the micro-batch average of the loss needs a mask",
    why="Without --eod-mask-loss all micro-batches count the same number of tokens, and both averages are equal.",
)
def loss_normalization(run: RunConfig) -> Messages:
    masks_loss = run.data.eod_mask_loss or architecture_of(run.model).masked_lm
    if run.train.loss_normalization == "micro-batch" and not masks_loss:
        yield (
            "--loss-normalization micro-batch has no effect without --eod-mask-loss: add it, or remove "
            "--loss-normalization"
        )


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


@rule(
    "a batch size that varies needs --train-samples",
    why="The sizes follow from the consumed samples, and so do the number of iterations and the learning rate.",
)
def sample_based(run: RunConfig) -> Messages:
    train, optim = run.train, run.optim
    if not (train.rampup_batch_size or train.step_batch_size_schedule):
        return
    if train.train_samples is None:
        yield f"{_batch_flag(run)} needs --train-samples: give it instead of --train-iters"
    counted_in_iterations = {
        "--lr-decay-iters": optim.lr_decay_iters is not None,
        "--lr-warmup-iters": optim.lr_warmup_iters is not None,
        "--lr-wsd-decay-iters": optim.lr_wsd_decay_iters is not None,
    }
    if flags := enabled(counted_in_iterations):
        yield f"{flags} cannot be combined with {_batch_flag(run)}: use {flags.replace('iters', 'samples')}"


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


@rule("WSD needs --lr-wsd-decay-iters", why="The length of its decay phase has no default.")
def wsd(run: RunConfig) -> Messages:
    optim = run.optim
    lengths = {"iters": optim.lr_wsd_decay_iters, "samples": optim.lr_wsd_decay_samples}
    given = [f"--lr-wsd-decay-{unit}" for unit, length in lengths.items() if length is not None]
    if optim.lr_decay_style == "WSD" and not given:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters"
    if optim.lr_decay_style != "WSD" and given:
        yield f"{given[0]} has no effect without --lr-decay-style WSD: add it, or remove {given[0]}"


excludes(
    "optim.override_lr_scheduler",
    "optim.use_checkpoint_lr_scheduler",
    why="On resume, the schedule comes from either the command line or the checkpoint.",
)


@rule(
    "the tokenizer suits the model",
    why="GPT-2 needs an end-of-document token; BERT needs tokens that frame, pad and mask.",
)
def tokenizer(run: RunConfig) -> Messages:
    data, model = run.data, architecture_of(run.model)
    if model.provider is not None:
        return
    is_null = data.tokenizer_type == NULL_TOKENIZER
    if data.tokenizer_type not in model.tokenizers and not (is_null and (data.mock_data or not model.masked_lm)):
        instead = " or ".join(model.tokenizers)
        mock = ", or add --mock-data" if is_null else ""
        yield f"--tokenizer-type {data.tokenizer_type} does not suit {run.model.architecture}: use {instead}{mock}"


@rule("BPE needs merges", why="The vocabulary alone does not determine how text is tokenized.")
def merges(run: RunConfig) -> Messages:
    data = run.data
    if data.tokenizer_type == "GPT2BPETokenizer" and data.merge_file is None and _needs_tokenizer(run):
        suits = "WhitespaceTokenizer" in architecture_of(run.model).tokenizers
        other = "; for a vocabulary of whole words use --tokenizer-type WhitespaceTokenizer" if suits else ""
        yield f"--merge-file is required with --tokenizer-type GPT2BPETokenizer{other}"


@rule(
    "a vocabulary of whole words has no merges",
    why="Command lines for Megatron-LM name a file of merges whatever the tokenizer.",
    otherwise="reads the file, which may not exist",
    only_warns=True,
)
def merges_of_words(run: RunConfig) -> Messages:
    yield from unused_merges(run.data.tokenizer_type, run.data.merge_file)


@rule("a tokenizer has a vocabulary", why="It is in a file, or for NullTokenizer a number.")
def tokenizer_files(run: RunConfig) -> Messages:
    data = run.data
    if data.tokenizer_type == NULL_TOKENIZER:
        for flag, file in (("--vocab-file", data.vocab_file), ("--merge-file", data.merge_file)):
            if file is not None:
                yield f"{flag} {file} has no effect with NullTokenizer: remove it, or give another --tokenizer-type"
        if data.vocab_size is None:
            yield "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens"
    elif data.vocab_file is None and _needs_tokenizer(run):
        yield "--vocab-file is required"


@rule("--vocab-size is for NullTokenizer", why="The others count the tokens of their files.", only_warns=True)
def vocab_size(run: RunConfig) -> Messages:
    if run.data.vocab_size is not None and run.data.tokenizer_type != NULL_TOKENIZER:
        yield (
            f"--vocab-size {run.data.vocab_size} has no effect with {run.data.tokenizer_type}, which counts the tokens "
            "of its files: remove it"
        )


def _needs_tokenizer(run: RunConfig) -> bool:
    """Whether a tokenizer with files is needed: a provided model may do without."""
    return run.data.vocab_file is not None or architecture_of(run.model).provider is None


@rule("a pair of sentences fits into a sample", why="BERT's samples are pairs of sentences with three special tokens.")
def pairs(run: RunConfig) -> Messages:
    tokens = run.data.seq_length
    if architecture_of(run.model).masked_lm and 0 < tokens < 5:
        yield f"--seq-length {tokens} is too short for [CLS] and two tokens with a [SEP] after each: use 5 or more"


@rule(
    "a blend has a weight before each prefix",
    why="The share of each data set is its weight divided by the sum of all weights.",
)
def blends(run: RunConfig) -> Messages:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        try:
            if words := getattr(run.data, name):
                read_blend(words)
        except ValueError as error:
            yield f"--{name.replace('_', '-')} {' '.join(words)}: {error}"


needs("data.train_data_path", "data.valid_data_path", "data.test_data_path")
needs("checkpoint.save", "checkpoint.save_interval", only_warns=True)
needs("checkpoint.save", "checkpoint.async_save", "checkpoint.keep_last")
needs("checkpoint.keep_last", "checkpoint.keep_every")
needs("checkpoint.save", "checkpoint.auto_resume")
needs("checkpoint.load", "checkpoint.finetune", "checkpoint.override")
needs("checkpoint.save", "checkpoint.on_save_error")
needs("checkpoint.save_interval", "train.rewind_on_spike")
needs("train.rewind_on_spike", "train.spike_factor")
excludes("checkpoint.auto_resume", "checkpoint.finetune", why="A resumed run would start at iteration 0 again.")


@rule("--load-strict needs a checkpoint to load", why="It refuses to load a broken checkpoint.")
def load_strict(run: RunConfig) -> Messages:
    if run.checkpoint.load_strict and run.checkpoint.load is None and not run.checkpoint.auto_resume:
        yield "--load-strict has no effect without --load or --auto-resume: add one, or remove --load-strict"


needs("observe.trace", "observe.trace_steps")


@rule("traced and profiled iterations are part of the run", why="The output would be empty otherwise.")
def step_ranges(run: RunConfig) -> Messages:
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


@rule("a profile needs a folder", why="Profiles are written to files only.")
def profile_folder(run: RunConfig) -> Messages:
    observe = run.observe
    if observe.profiles and observe.profile_dir is None:
        flag = "--profile-steps" if observe.profile_steps else "--flops-profile-step"
        yield f"{flag} needs a folder: add --profile-dir, or --trace"
    if not observe.profiles and observe.profile_dir not in (None, observe.trace):
        yield (
            "--profile-dir has no effect without --profile-steps or --flops-profile-step: add one, or remove "
            "--profile-dir"
        )


@rule(
    "the FLOPs profiler needs the plain engine",
    why="DeepSpeed writes the profile in a method that its pipeline engine does not call.",
    otherwise="counts operations, and writes nothing",
)
def flops_on_plain_engine(run: RunConfig) -> Messages:
    if run.observe.flops_profile_step is not None and run.parallel.uses_pipeline:
        yield (
            f"--flops-profile-step cannot be combined with --pipe-parallel-size {run.parallel.pipe_parallel_size}: use "
            "--pipe-parallel-size 0, or see the forward FLOPs of each stage that --explain prints"
        )


needs("logging.dry_run", "logging.rank")
needs("logging.timing_log_level", "logging.log_timers_to_tensorboard", only_warns=True)
needs("logging.tensorboard_dir", "logging.log_timers_to_tensorboard", only_warns=True)
excludes("logging.explain", "logging.dry_run", why="--explain prints rules; --dry-run builds layers.")


@rule("--dry-run and --run-dir need the spec of the model", why="Planned memory and time follow from it.")
def plans_need_spec(run: RunConfig) -> Messages:
    if architecture_of(run.model).provider is not None:
        for flag, value in (("--dry-run", run.logging.dry_run), ("--run-dir", run.observe.run_dir)):
            if value:
                yield f"{flag} plans memory and time, and the model of {run.model.architecture} has no spec: remove it"


@rule("--rank names ranks of the run", why="Other ranks have no layers to build.")
def dry_ranks(run: RunConfig) -> Messages:
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
