"""Rules about checkpoints, logs, traces and profiles."""

from megatron.cli.validation.rules import Messages, rule
from megatron.common.errors import counted
from megatron.config import RunConfig
from megatron.config.output import steps


@rule("--snapshot-interval needs a run that resumes by itself", why="Its next start uses the newest snapshot.")
def snapshots_are_resumed(run: RunConfig) -> Messages:
    checkpoint = run.checkpoint
    if checkpoint.snapshot_interval is not None and not (
        checkpoint.auto_resume or checkpoint.save is None or checkpoint.load == checkpoint.save
    ):
        yield "--snapshot-interval has no effect on a run that does not resume: add --auto-resume"


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
