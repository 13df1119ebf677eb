"""Checks that the files of another Megatron's checkpoint are complete, of one iteration, and of the ranks they name."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_PROGRESS = ("iteration", "global_steps")


def check_one_run(folder: Path, files: Sequence[Sequence[tuple[Path, Mapping[str, Any]]]]) -> None:
    """Check the files of each tensor-parallel rank, which are one for each pipeline stage: path and content.

    Files without saved arguments, or without an iteration, are not compared. Raises CheckpointError.
    """
    in_order = [file for stage in zip(*files, strict=False) for file in stage]
    for (first, before), (path, content) in pairwise(in_order):
        for key in (key for key in _PROGRESS if type(before.get(key)) is type(content.get(key)) is int):
            if content[key] != before[key]:
                progress = f"{key} {content[key]}, and {first} of {before[key]}"
                raise CheckpointError(f"{path} is of {progress}: copy all files of one checkpoint")
    check_sizes(folder, in_order[0][1], len(files), len(files[0]))
    ranks = [_number(content, "rank") for _, content in in_order]
    if len(set(ranks)) == 1:  # a tool that wrote all files, or none was saved
        return
    for (first, before), (path, content) in pairwise(in_order):
        rank, previous = _number(content, "rank"), _number(before, "rank")
        if rank is not None and previous is not None and rank <= previous:
            raise CheckpointError(
                f"{path} is of rank {rank}, and {first} of rank {previous}: files were exchanged; copy them again"
            )


def check_sizes(folder: Path, file: Mapping[str, Any], *found: int) -> None:
    """Raise CheckpointError if the arguments saved in ``file`` say other numbers of tensor ranks and stages than
    ``found``."""
    for name, size in zip(_SIZES, found, strict=False):
        if (saved := _number(file, name)) not in (None, size):
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(
                f"{folder} was saved with {flag} {saved}, and holds files of {size}: copy all of them"
            )


def _number(file: Mapping[str, Any], name: str) -> int | None:
    args = file.get("args")
    value = getattr(args, name, None) if isinstance(args, Namespace) else None
    return value if type(value) is int else None
