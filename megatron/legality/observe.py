"""The rules about timelines and profiles; see ``Rule`` for what a check returns."""

from megatron.config import RunConfig
from megatron.config.observe import steps


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
