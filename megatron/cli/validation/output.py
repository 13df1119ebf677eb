"""Rules about checkpoints, logs, traces and profiles."""

from megatron.cli.validation.rules import Messages, excludes, needs, rule
from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.config.output import steps
from megatron.model.architectures import architecture_of

needs("checkpoint.save", "checkpoint.save_interval", only_warns=True)
needs("checkpoint.save", "checkpoint.async_save", "checkpoint.keep_last")
needs("checkpoint.save", "checkpoint.snapshot_interval")
needs("checkpoint.snapshot_interval", "checkpoint.snapshot_dir")
needs("checkpoint.keep_last", "checkpoint.keep_every")
needs("checkpoint.save", "checkpoint.auto_resume")
needs("checkpoint.load", "checkpoint.finetune", "checkpoint.override")
needs("checkpoint.save", "checkpoint.on_save_error")
needs("checkpoint.save_interval", "train.rewind_on_spike")
needs("train.rewind_on_spike", "train.spike_factor")
excludes("checkpoint.auto_resume", "checkpoint.finetune", why="A resumed run would start at iteration 0 again.")
excludes(
    "checkpoint.load_hf",
    "checkpoint.load",
    why="Weights have one source; --auto-resume prefers a checkpoint in --save.",
)
excludes("checkpoint.load_hf", "model.model_preset", why="The folder describes its model.")


excludes(
    "checkpoint.snapshot_interval",
    "checkpoint.no_save_optim",
    why="A run that continues after a fault needs the state of the optimizer.",
)


@rule("--snapshot-interval needs a run that resumes by itself", why="Its next start uses the newest snapshot.")
def snapshots_are_resumed(run: RunConfig) -> Messages:
    checkpoint = run.checkpoint
    if checkpoint.snapshot_interval is not None and not (
        checkpoint.auto_resume or checkpoint.save is None or checkpoint.load == checkpoint.save
    ):
        yield "--snapshot-interval has no effect on a run that starts anew: add --auto-resume"


@rule("--snapshot-interval excludes offload to NVMe", why="Its state is in files of its host, not in memory.")
def snapshots_of_nvme(run: RunConfig) -> Messages:
    if run.checkpoint.snapshot_interval is not None and run.zero.uses_nvme:
        yield "--snapshot-interval does not work with offload to nvme: offload to cpu, or remove it"


@rule(
    "--snapshot-interval is not a multiple of --save-interval",
    why="After those iterations the state is on disk, unless --async-save still writes it.",
    only_warns=True,
)
def snapshots_between_saves(run: RunConfig) -> Messages:
    checkpoint = run.checkpoint
    interval, saves = checkpoint.snapshot_interval, checkpoint.save_interval
    if interval is not None and saves is not None and interval % saves == 0 and not checkpoint.async_save:
        yield f"--snapshot-interval {interval} has no effect with --save-interval {saves}: lower it, or remove it"


@rule("--load-hf needs the model of this program", why="Weights of a provided model have other names.")
def load_hf(run: RunConfig) -> Messages:
    if run.checkpoint.load_hf is not None and architecture_of(run.model).provider is not None:
        yield "--load-hf is for the model of pretrain_gpt2.py: remove it"


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
needs("logging.straggler_report", "logging.straggler_window")
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
