"""The weights of ZeRO 1 and 2, of which each data-parallel rank updates a part; the parts are gathered after a step.

DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py, ``step`` waits until all weights are gathered. Here a layer waits for
its own weights when the next forward pass reaches it. Tests: tests/training/test_races.py, test_synchronizations.py.
"""

from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work


class ShardedWeights:
    """Flat weights of parameter groups. The lists are the optimizer's own.

    Args:
        groups: the parameters of each group.
        flats: the flat weights of each group.
        parts: each rank's part of the flat weights of each group.
        ranks: the ranks that share each group.
        first_uses: position in the model of the first parameter of each group.
        used_early: parameters that are needed before their own layer runs, such as tied ones.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        flats: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        ranks: Sequence[ProcessGroup],
        first_uses: Sequence[int],
        used_early: Set[nn.Parameter],
    ):
        self._flats, self._parts, self._ranks = flats, parts, ranks
        self._in_order = sorted(range(len(flats)), key=first_uses.__getitem__)
        self._numbers = {parameter: number for number, group in enumerate(groups) for parameter in group}
        self._early = {self._numbers[parameter] for parameter in used_early if parameter in self._numbers}
        self._late: set[int] = set()
        self._gathering: dict[int, Work] = {}

    def gather_before(self, layers: Iterable[nn.Module]) -> None:
        """Make each of ``layers`` wait for its weights when it first runs, instead of in the step.

        Weights that are needed early, and weights not in ``layers``, are gathered before the step ends.
        """
        for layer in layers:
            needed = {self._numbers[parameter] for parameter in layer.parameters() if parameter in self._numbers}
            layer.register_forward_pre_hook(partial(self._wait_before, needed))
            self._late |= needed - self._early

    def update(self, masters: Sequence[Tensor]) -> None:
        """Copy this rank's updated part of each group, [part], and start to gather the groups in order of first use."""
        own = [parts[ranks.rank()] for parts, ranks in zip(self._parts, self._ranks, strict=True)]
        torch._foreach_copy_(own, list(masters))
        for number in self._in_order:
            flat, ranks = self._flats[number], self._ranks[number]
            if ranks.size() > 1:
                self._gathering[number] = dist.all_gather_into_tensor(flat, own[number], group=ranks, async_op=True)
        self.wait(self._gathering.keys() - self._late)

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Wait until the weights of these groups (default: all) are gathered."""
        for number in list(self._gathering if numbers is None else numbers):
            if number in self._gathering:
                self._gathering.pop(number).wait()

    def _wait_before(self, numbers: Set[int], *_: Any) -> None:
        if self._gathering:
            self.wait(numbers)
