"""Checks each given value by itself: required, in its range, and given in one unit only."""

import math
from collections.abc import Mapping

from megatron.config import flag_fields
from megatron.config.fields import Provided, flag_name

EXCLUSIVE = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    ("data_path", "train_data_path"),
    ("split", "train_data_path"),
)
"""Fields that say the same in different ways, so that only one of each row may be given."""


def value_problems(given: Mapping[str, Provided]) -> list[str]:
    """A message for each required value that is missing, each out of its range, and each given in two units."""
    problems = []
    for name, field in flag_fields().items():
        about = field.metadata["flag"]
        if name not in given:
            if about["required"]:
                problems.append(f"{flag_name(field)} is required")
        elif about["within"] and given[name].value is not None and not inside(given[name].value, about["within"]):
            problems.append(f"{given[name].source} must be {interval_in_words(about['within'])}")
    for row in EXCLUSIVE:
        said = [given[name].source for name in row if name in given]
        if len(said) > 1:
            problems.append(f"{' and '.join(said)} exclude each other: give one")
    if "train_iters" not in given and "train_samples" not in given:
        problems.append("--train-iters is required (or --train-samples)")
    if "data_path" not in given and "train_data_path" not in given:
        problems.append("--data-path is required (or --train-data-path)")
    return problems


def inside(value: float, interval: str) -> bool:
    """Whether ``value`` lies in an interval such as ``"[0, 1)"``."""
    low, high = ends(interval)
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def interval_in_words(interval: str) -> str:
    """An interval such as ``"[0, 1)"`` as a message says it."""
    low, high = ends(interval)
    if math.isinf(high):
        return f"{low:g} or more" if interval[0] == "[" else f"more than {low:g}"
    return f"from {low:g} to {high:.0f}" + ("" if interval[-1] == "]" else f", {high:g} excluded")


def ends(interval: str) -> tuple[float, float]:
    """The two numbers of an interval; an open side has ``inf``."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)
