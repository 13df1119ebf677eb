"""DeepSpeed's FLOPs profiler, as ``--flops-profile-step`` asks for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ObserveConfig

SECTION = "flops_profiler"
FILE = "flops-profile.txt"


def profile_problems(observe: ObserveConfig, file: Mapping[str, Any]) -> list[str]:
    """What keeps flag and file from being brought together."""
    if observe.flops_profile_step is not None and SECTION in file:
        return [f"--flops-profile-step and {SECTION} in the JSON exclude each other: remove one"]
    return []


def complete_profile(tree: dict[str, Any], observe: ObserveConfig) -> None:
    """Write the profiler's section, where the flag asks for it. DeepSpeed counts steps from 0 on."""
    if observe.flops_profile_step is not None:
        tree[SECTION] = {
            "enabled": True,
            "profile_step": observe.flops_profile_step - 1,
            "output_file": str(Path(str(observe.profile_dir)) / FILE),
        }
