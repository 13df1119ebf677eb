"""Rules about the backend, loss, optimizer, batch sizes and learning rate."""

from megatron.cli.validation.rules import Messages, enabled, excludes, rule
from megatron.common.errors import nearest_multiples
from megatron.config import RunConfig
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
    "Muon runs at ZeRO 0 to 2 on the device",
    why="It orthogonalizes whole matrices, which it gathers from the partitions of ZeRO 1 and 2.",
)
def muon(run: RunConfig) -> Messages:
    if run.optim.optimizer != "muon":
        return
    if run.zero.zero_stage == 3:
        yield "--optimizer muon does not work at --zero-stage 3, which divides every matrix: use --zero-stage 2"
    if run.zero.offloads_optimizer:
        yield "--optimizer muon cannot be offloaded: its products are too slow on the CPU; remove --offload-optimizer"
    if architecture_of(run.model).provider is not None:
        yield "--optimizer muon needs a model with a spec, which states its matrices: use --optimizer adam"


@rule(
    "Adafactor runs without ZeRO and tensor parallelism",
    why="Its state is the sums of a whole matrix's rows and columns, and its step depends on a whole matrix's norm.",
    otherwise="computes another update on each layout",
)
def adafactor(run: RunConfig) -> Messages:
    remedies = {
        "--zero-stage 0": run.zero.zero_stage > 0 and run.precision.dtype == "fp32",
        "fp32 at --zero-stage 0": run.zero.zero_stage > 0 and run.precision.dtype != "fp32",
        "--model-parallel-size 1": run.parallel.model_parallel_size > 1,
    }
    if run.optim.optimizer == "adafactor" and (needed := enabled(remedies)):
        yield f"--optimizer adafactor needs whole matrices on each rank: use {needed}, or --optimizer adam"


@rule(
    "an optimizer on NVMe is Adam",
    why="DeepSpeed 0.19.8 tests its exchange of states with NVMe for Adam only.",
)
def swapped_optimizer(run: RunConfig) -> Messages:
    optimizer = run.optim.optimizer
    if run.zero.offload_optimizer == "nvme" and optimizer in ("sgd", "lion"):
        yield f"--optimizer {optimizer} does not work with --offload-optimizer nvme: use --offload-optimizer cpu"


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
