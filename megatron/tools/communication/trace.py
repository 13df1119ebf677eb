"""What a rank communicates, in the order in which it does: calls, and waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TRANSFERS = ("send", "recv")
"""Kinds of operations of two ranks; all others are of all ranks of a group."""


class Call(NamedTuple):
    """A call of an operation. Equal calls of a rank are one object."""

    kind: str
    group: int
    """Number of the group among those that the rank is in, in the order in which they are made; 0 has all ranks."""
    elements: int
    dtype: str
    size: int
    """Bytes that the rank contributes, or receives of a transfer."""
    peer: int
    """Of a transfer: the other rank's place in the group minus the own one. Else the root's place, or -1."""
    detail: str
    phase: str
    place: str
    """``FILE:LINE FUNCTION`` that called."""

    @property
    def signature(self) -> tuple:
        """What must be the same on all ranks of the group."""
        return self.kind, self.elements, self.dtype, self.peer, self.detail

    def __str__(self) -> str:
        size = f" of {self.elements:,} {self.dtype}" if self.dtype else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{size}{detail} at {self.place}"


class Issue(NamedTuple):
    """Calls that begin together: one, or a batch of transfers."""

    calls: tuple[Call, ...]
    blocks: bool
    """Whether the rank goes on only when they are done."""


class Wait(NamedTuple):
    """A wait for the calls of an ``Issue``."""

    issue: int
    """Its number among the events of the thread."""
    place: str


Event = Issue | Wait


@dataclass
class Trace:
    """What one rank communicates in a run."""

    rank: int
    groups: list[tuple[int, ...]] = field(default_factory=list)
    """The ranks of every group that is made, in this order, whether this rank is in it or not."""
    threads: dict[str, list[Event]] = field(default_factory=dict)
    """By the name of the thread."""
    faults: list[str] = field(default_factory=list)
    """What is wrong on this rank alone: buffers that are used while they are sent or received."""
    exit_code: int = 0


def groups_of_ranks(groups: Sequence[tuple[int, ...]], world_size: int) -> list[list[int]]:
    """For each rank, the numbers of the groups that it is in; the first has all ranks."""
    found: list[list[int]] = [[] for _ in range(world_size)]
    for number, ranks in enumerate(groups):
        for rank in ranks:
            found[rank].append(number)
    return found
