"""What a run writes: checkpoints, logs, timelines and profiles."""

import re
from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = flag(None, "Folder to save checkpoints in.", metavar="DIR")
    save_interval: int | None = flag(None, "Iterations between saves (default: only at the end).", within="[1, inf)")
    no_save_optim: bool = flag(False, "Save no optimizer state.")
    no_save_rng: bool = flag(False, "Save no random states.")
    async_save: bool = flag(False, "Copy the state to host memory, and write it while training goes on.")
    keep_last: int | None = flag(None, "Newest checkpoints to keep (default: all).", within="[1, inf)")
    keep_every: int | None = flag(
        None, "With --keep-last: keep those of iterations divisible by this as well.", within="[1, inf)"
    )
    on_save_error: str = flag(
        "stop", "What a checkpoint that cannot be written does to training.", choices=("stop", "continue")
    )
    load: str | None = flag(None, "Folder to load from. The same as --save, and empty: a fresh start.", metavar="DIR")
    load_strict: bool = flag(False, "Refuse a broken checkpoint instead of falling back to the newest whole one.")
    auto_resume: bool = flag(
        False, "Go on from what is in --save; where that is nothing, begin with --load, or fresh without it."
    )
    no_load_optim: bool = flag(False, "Load no optimizer state.")
    no_load_rng: bool = flag(False, "Load no random states.")
    finetune: bool = flag(False, "Load weights only, and begin at iteration 0.")
    override: bool = flag(
        False, "Resume although data, tokenizer, batch, learning rate or other settings differ from the checkpoint's."
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What one sees."""

    log_interval: int = flag(100, "Iterations between progress lines.", within="[1, inf)")
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard.", metavar="DIR")
    metrics_file: str | None = flag(None, "File for one JSON object per logged iteration.", metavar="FILE")
    watchdog_minutes: float | None = flag(
        None,
        "End the run when an iteration, a save or an evaluation takes longer. Each rank writes where it is to "
        "hang-rankN.txt in --save, or in the working folder without it; the screen says which rank is behind.",
        within="(0, inf)",
    )
    verbose: bool = flag(False, "Let DeepSpeed talk.")
    explain: bool = flag(
        False, "Print layout, groups of ranks, DeepSpeed config and every rule with what it finds, and start nothing."
    )
    dry_run: bool = flag(
        False,
        "Build the layers of some ranks without memory, print their parameters, groups and memory, and train nothing.",
    )
    rank: str | None = flag(
        None, "With --dry-run: ranks to build, such as 0,513 (default: one of each pipeline stage).", metavar="RANKS"
    )

    @property
    def ranks(self) -> list[int] | None:
        """The numbers in ``rank``. Raises ValueError where there are others."""
        return None if self.rank is None else [int(number) for number in self.rank.split(",")]


_STEPS = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """A closer look: timelines, profiles and reports."""

    trace: str | None = flag(
        None,
        "Folder for a timeline of what each rank does: load, forward, backward, send, receive, reduce, step, and each "
        "layer. As JSON for Perfetto, and as a picture with the measured bubble.",
        metavar="DIR",
    )
    trace_steps: str = flag(
        "2:4", "Iterations to trace, the first and the last of them, counted from this start on.", metavar="A:B"
    )
    profile_steps: str | None = flag(
        None, "Iterations to profile with torch's profiler, counted from this start on.", metavar="A:B"
    )
    flops_profile_step: int | None = flag(
        None, "Iteration of which DeepSpeed's FLOPs profiler counts the operations (plain engine).", within="[1, inf)"
    )
    profile_dir: str | None = flag(None, "Folder for profiles (default: that of --trace).", metavar="DIR")
    run_dir: str | None = flag(
        None,
        "Folder for what tools/report.py shows: run.json with configuration and environment, and, where no "
        "--metrics-file is named, metrics.jsonl.",
        metavar="DIR",
    )

    @property
    def traces_or_profiles(self) -> bool:
        """Whether single iterations are looked at from within."""
        return self.trace is not None or self.profiles

    @property
    def profiles(self) -> bool:
        """Whether anything is profiled."""
        return self.profile_steps is not None or self.flops_profile_step is not None


def steps(text: str) -> range:
    """The iterations that ``A:B`` stands for, both ends among them; none where it is no such range."""
    ends = _STEPS.fullmatch(text)
    return range(int(ends[1]), int(ends[2]) + 1) if ends and int(ends[1]) > 0 else range(0)
