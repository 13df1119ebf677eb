"""Checks what the files of several ranks of a checkpoint have in common. ``schema`` checks those of a single rank."""

from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.checks import check_numbers, form_errors, wrong
from megatron.checkpoint.collective_errors import gathered_on_rank_0, on_all_ranks
from megatron.checkpoint.parameter_state import SavedStates
from megatron.checkpoint.schema import Steps, check_numbering, check_same

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
    check_shards(states, part)
    check_copies(states, part)
    return steps


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


def check_share_of_copies(states: SavedStates) -> None:
    """``check_copies``, distributed: each rank compares every n-th parameter. Every rank must call it."""
    on_all_ranks(lambda: check_copies(states, _own_share()))


def _own_share() -> slice:
    return slice(dist.get_rank(), None, dist.get_world_size())
