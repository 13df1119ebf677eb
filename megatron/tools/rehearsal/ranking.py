"""The best layouts of a plan, rehearsed and ranked by the step that is then expected."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.common.errors import ResourceError
from megatron.common.units import duration, with_prefix
from megatron.tools.planning.output import aligned, layout_of
from megatron.tools.planning.search import Candidate
from megatron.tools.rehearsal.estimate import Expected
from megatron.tools.rehearsal.request import Rehearsal, representative_ranks
from megatron.tools.rehearsal.start import checked_run, rehearse_ranks


class Rehearsed(NamedTuple):
    """A layout and what its ranks took."""

    number: int
    """Its row in the plan, from 1 on."""
    candidate: Candidate
    expected: Expected | None
    """None if this machine has too little memory for a rank."""

    @property
    def peak(self) -> int:
        """Bytes of the rank that takes most."""
        ranks = self.expected.ranks if self.expected else ()
        return max((rank["memory_bytes"]["peak"] for rank in ranks), default=0)


def rehearse_layouts(candidates: Sequence[Candidate], program: Path, steps: int) -> Iterator[Rehearsed]:
    """Rehearse a rank of each kind of stage of each layout. Raises UserError if the program cannot be started."""
    for number, one in enumerate(candidates, 1):
        request = one.request
        rehearsal = Rehearsal(
            one.command, request.architecture, request.devices, request.machine.per_node, steps, fake=False
        )
        run = checked_run(rehearsal)
        try:
            ranks = list(rehearse_ranks(rehearsal, representative_ranks(run), program))
        except ResourceError:
            yield Rehearsed(number, one, None)
        else:
            yield Rehearsed(number, one, Expected(run, request.machine, ranks))


def ranked(layouts: Sequence[Rehearsed]) -> list[str]:
    """A table of ``layouts``, the fastest first."""
    fastest = sorted(layouts, key=lambda one: one.expected.seconds if one.expected else float("inf"))
    return aligned([("row", "TP", "PP", "DP", "ZeRO", "micro", "planned step", "expected step", "between",
                     "planned memory", "peak memory"), *map(_row, fastest)])  # fmt: skip


def _row(one: Rehearsed) -> tuple[str, ...]:
    layout, planned = layout_of(one.candidate), one.candidate
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "zero_stage", "micro_batch_size")
    sizes = [str(one.number), *(str(layout[name]) for name in names), duration(planned.timing.total)]
    memory = with_prefix(planned.memory.total, "B")
    if one.expected is None:
        return (*sizes, "out of memory here", "", memory, "")
    low, high = one.expected.between
    between = f"{duration(low)} to {duration(high)}"
    room = "" if one.peak <= planned.request.room else " (too much)"
    return (*sizes, duration(one.expected.seconds), between, memory, with_prefix(one.peak, "B") + room)
