"""Checks what the files of several ranks of a checkpoint have in common. ``schema`` checks those of a single rank."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.checks import check_numbers, form_errors, wrong
from megatron.checkpoint.collective_errors import gathered_on_rank_0, on_all_ranks
from megatron.checkpoint.parameter_state import SavedStates
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.saved_files import SavedFiles
from megatron.checkpoint.schema import Steps, check_numbering, check_same
from megatron.common.errors import shown

_ALL = slice(None)
_ROUNDING = 1e-3
"""Maximum difference of copies, relative to the tensor's largest number, since devices may round differently."""


def check_states(states: SavedStates, part: slice = _ALL) -> Steps:
    """Make all checks of this module for ``part`` of the parameters and of the optimizer's files.

    Returns the step counts, which the caller compares with those of other parts. Raises CheckpointError.
    """
    steps: Steps = {}
    with form_errors(states.saved.path):
        for file, base in states.files.optimizers(part):
            with form_errors(file):
                steps |= check_numbering(file, base, states.saved.iteration)
        check_same("step counts", [steps])
    check_alike(states.files, part)
    check_shards(states, part)
    check_copies(states, part)
    return steps


_OF_THE_RUN = """iteration consumed_samples tokens checkpoint_version lr_scheduler global_steps global_samples
    skipped_steps dp_world_size mp_world_size ds_version""".split()
"""Entries of a rank's file that are not its own."""


def check_alike(files: SavedFiles, part: slice = _ALL) -> None:
    """Raise CheckpointError unless the files of ranks agree on what is that of the run, such as schedule and counts."""
    first, *others = files.all_models()
    for file in others[part]:
        with form_errors(file.path):
            for key in _OF_THE_RUN:
                found, expected = (each.content.get(key) for each in (file, first))
                if found != expected:
                    other = f"{shown(_beyond(expected, found))} as in {first.path.name}"
                    raise wrong(file.path, key, shown(_beyond(found, expected)), other)


def _beyond(one: Any, other: Any) -> Any:
    """``one``, of two mappings only what ``other`` has not."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def check_shards(states: SavedStates, part: slice = _ALL, *, optimizer: bool = True) -> None:
    """Raise CheckpointError unless stored shards have the types and shapes of their parameters. Reads no tensor.

    Weights are checked also where training reads the optimizer's master weights.
    """
    with form_errors(states.saved.path):
        for name, rank in product([*states.specs][part], range(states.layout.model_parallel_size)):
            states.weight(name, rank)
            if optimizer:
                states.state(name, rank)


def check_copies(states: SavedStates, part: slice = _ALL, *, optimizer: bool = True) -> None:
    """Raise CheckpointError unless tensors that are replicated over tensor-parallel ranks are equal on them."""
    with form_errors(states.saved.path):
        for name, copies in states.copies(part, optimizer=optimizer):
            first = copies[0].read_all()
            for copy in copies[1:]:
                check_equal(copy.path, name, copy.read_all(), first, copies[0].path.name)


def check_equal(place: Path, name: str, copy: Tensor, first: Tensor, where: str) -> None:
    """Raise CheckpointError unless ``copy`` is finite and, but for rounding, equal to ``first``, that in ``where``."""
    check_numbers(place, name, copy)
    one, other = first.float(), copy.float()
    apart, largest = (float(each.abs().max()) for each in (one - other, torch.stack([one, other])))
    if apart > largest * max(_ROUNDING, 2 * torch.finfo(copy.dtype).eps):
        difference = f"up to {apart:.3g} from what it is in {where}, of numbers up to {largest:.3g}"
        raise wrong(place, name, difference, "equal: all tensor-parallel ranks have it")


def check_share_of_states(states: SavedStates) -> None:
    """``check_states``, distributed: each rank checks every n-th part. Every rank must call it."""
    gathered_on_rank_0(lambda: check_states(states, _own_share()), partial(check_same, "step counts"))


def check_share_of_copies(saved: SavedRun, *, has_spec: bool) -> None:
    """``check_alike`` and, of a model that ``has_spec``, ``check_copies``, distributed: each rank compares every n-th
    file and parameter. Every rank must call it.
    """

    def check() -> None:
        check_alike(SavedFiles(saved, verified=True), _own_share())
        if has_spec:
            check_copies(SavedStates(saved, verified=True), _own_share())

    on_all_ranks(check)


def _own_share() -> slice:
    return slice(dist.get_rank(), None, dist.get_world_size())
