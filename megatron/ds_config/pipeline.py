"""What travels between pipeline stages: a copy on each tensor-parallel rank, or a part of it on each.

DeepSpeed sends parts unless it is told otherwise: each rank sends its part of a tensor that all of them
hold alike, and the next stage puts it together. Where each rank holds another tensor that mixes them up.
"""

from collections.abc import Mapping
from typing import Any

from megatron.config import ParallelConfig, RunConfig

_SECTION, _KEYS = "pipeline", ("pipe_partitioned", "grad_partitioned")


def pipeline_problems(run: RunConfig, file: Mapping[str, Any]) -> list[str]:
    """A message for each key of a config file that asks for parts where only whole tensors can travel."""
    cause, section = _sends_whole(run.parallel), file.get(_SECTION, {})
    return [
        f"{_SECTION}.{key} true cannot go with {cause}: set it to false, or remove it"
        for key in _KEYS
        if cause and section.get(key)
    ]


def complete_pipeline(tree: dict[str, Any], parallel: ParallelConfig) -> None:
    """Switch the sending of parts off in ``tree`` where only whole tensors can travel."""
    if _sends_whole(parallel):
        tree.setdefault(_SECTION, {}).update(dict.fromkeys(_KEYS, False))


def _sends_whole(parallel: ParallelConfig) -> str | None:
    """The flag by which tensors travel whole, and its reason; None where parts will do."""
    if not parallel.uses_pipeline:
        return None
    if parallel.sequence_parallel:
        return "--sequence-parallel, by which no two tensor-parallel ranks send the same tensor"
    if parallel.folds_pipeline:
        return f"--pipeline-schedule {parallel.pipeline_schedule}, whose engine sends whole tensors only"
    return None
