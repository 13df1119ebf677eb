"""Looking closer at a run: timelines, profiles, and what a report is made of."""

import re
from dataclasses import dataclass

from megatron.config.fields import flag

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
    def looks_closer(self) -> bool:
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
