"""Check that ranks that communicate as their traces say cannot wait for each other forever, by NCCL's rules.

Each communicator is a queue: a rank's operations on it run one after the other, in the order of the calls. A collective
runs once it is the first in the queue of every rank of its group, and is the same there; a transfer once it is the
first at both ends, since no send is buffered; a batch is one entry, whose transfers run together. A rank begins a call
when it has passed all earlier waits.

A collective blocks the rank that calls it, even if the rank itself does not wait for it: two communicators that are
used in opposite orders by two ranks can deadlock on a GPU whose streams have to take turns. Transfers of their own
direction between two stages are received ahead of time; these block where they are waited for.
"""

from collections import deque
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


class Program(NamedTuple):
    """What a rank does: the threads of the trace of its class, and the groups that it is in itself."""

    rank: int
    threads: Sequence[Sequence[Event]]
    groups: Sequence[tuple]
    """Each a name that all ranks of the group know it by, and its ranks."""


class Counterexample(Exception):  # noqa: N818
    """Why ranks hang, in words."""


def programs(traces: Sequence[Trace]) -> list[Program]:
    """The program of every rank, of which ``traces`` has that of a rank of its class."""
    found: list[Program] = []
    world_size = len(traces)
    named: dict[int, list[tuple]] = {}
    own: dict[int, list[list[int]]] = {}
    for rank, trace in enumerate(traces):
        if id(trace) not in named:
            named[id(trace)] = _named(trace.groups)
            own[id(trace)] = groups_of_ranks(trace.groups, world_size)
        names = named[id(trace)]
        groups = [((), tuple(range(world_size))), *(names[number] for number in own[id(trace)][rank])]
        threads = [events for _, events in sorted(trace.threads.items())]
        found.append(Program(rank, threads, groups))
    return found


def _named(groups: Sequence[tuple[int, ...]]) -> list[tuple]:
    """Groups of the same ranks are told apart by their order."""
    seen: dict[tuple[int, ...], int] = {}
    names = []
    for ranks in groups:
        seen[ranks] = seen.get(ranks, 0) + 1
        names.append(((ranks, seen[ranks]), ranks))
    return names


class _Communicator:
    """A group of ranks, the queue of each of them, and the collective that they have reached."""

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks = ranks
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.queues: dict[int, deque[_Entry]] = {rank: deque() for rank in ranks}
        self.arrived: list[_Entry] = []
        self.number = 0


class _Entry:
    """An ``Issue`` of a thread, in the queue of its communicator."""

    __slots__ = ("calls", "communicator", "event", "is_done", "thread", "unmatched")

    def __init__(self, thread: "_Thread", event: int, communicator: _Communicator, calls: tuple[Call, ...]):
        self.thread, self.event, self.communicator, self.calls = thread, event, communicator, calls
        self.is_done = False
        self.unmatched = list(calls) if calls[0].kind in TRANSFERS else []


class _Thread:
    """How far a thread of a rank is."""

    __slots__ = ("awaited", "entries", "events", "groups", "position", "rank", "waits_at")

    def __init__(self, rank: int, events: Sequence[Event], groups: list[_Communicator]):
        self.rank, self.events, self.groups = rank, events, groups
        self.position = 0
        self.entries: dict[int, _Entry] = {}
        self.awaited: _Entry | None = None
        self.waits_at = ""


def check(ranks: Sequence[Program]) -> None:
    """Run all ranks. Raises Counterexample if they cannot all reach their ends."""
    communicators: dict[tuple, _Communicator] = {}
    threads = []
    for program in ranks:
        groups = []
        for name, members in program.groups:
            if name not in communicators:
                communicators[name] = _Communicator(members)
            groups.append(communicators[name])
        threads += [_Thread(program.rank, events, groups) for events in program.threads]
    runnable = deque(threads)
    while runnable:
        _advance(runnable.popleft(), runnable)
    stuck = [thread for thread in threads if thread.awaited is not None]
    if stuck:
        raise Counterexample(_explained(stuck, threads))
    for communicator in communicators.values():
        for rank, queue in communicator.queues.items():
            if queue:
                raise Counterexample(f"rank {rank} ends, and no other rank takes part in its {queue[0].calls[0]}")


def _advance(thread: _Thread, runnable: deque[_Thread]) -> None:
    """Go on until the thread waits or ends."""
    thread.awaited = None
    events, entries = thread.events, thread.entries
    while thread.position < len(events):
        event = events[thread.position]
        if isinstance(event, Wait):
            entry = entries.get(event.issue)
            if entry is not None and not entry.is_done:
                thread.awaited, thread.waits_at = entry, event.place
                return
            entries.pop(event.issue, None)
            thread.position += 1
            continue
        entry = entries.get(thread.position)
        if entry is None:
            first = event.calls[0]
            communicator = thread.groups[first.group]
            entry = entries[thread.position] = _Entry(thread, thread.position, communicator, event.calls)
            queue = communicator.queues[thread.rank]
            queue.append(entry)
            if queue[0] is entry:
                _reach(entry, runnable)
        if (event.blocks or entry.calls[0].kind not in TRANSFERS) and not entry.is_done:
            thread.awaited, thread.waits_at = entry, entry.calls[0].place
            return
        if event.blocks:
            del entries[thread.position]
        thread.position += 1


def _reach(entry: _Entry, runnable: deque[_Thread]) -> None:
    """``entry`` is the first in its queue."""
    heads = deque([entry])
    while heads:
        head = heads.popleft()
        done = _match_transfers(head) if head.calls[0].kind in TRANSFERS else _arrive(head)
        for one in done:
            one.is_done = True
            queue = one.communicator.queues[one.thread.rank]
            queue.popleft()
            if queue:
                heads.append(queue[0])
            if one.thread.awaited is one:
                one.thread.awaited = None
                runnable.append(one.thread)


def _arrive(entry: _Entry) -> Sequence[_Entry]:
    """The entries of a collective that all ranks have reached with ``entry``."""
    communicator, call = entry.communicator, entry.calls[0]
    if communicator.arrived:
        first = communicator.arrived[0]
        if first.calls[0] is not call and first.calls[0].signature != call.signature:
            raise Counterexample(
                f"ranks {first.thread.rank} and {entry.thread.rank} call different operations as number "
                f"{communicator.number + 1} of their group of {_of_ranks(communicator.ranks)}, in {call.phase}:\n"
                f"  rank {first.thread.rank}: {first.calls[0]}\n  rank {entry.thread.rank}: {call}"
            )
    communicator.arrived.append(entry)
    if len(communicator.arrived) < len(communicator.ranks):
        return ()
    done, communicator.arrived = communicator.arrived, []
    communicator.number += 1
    return done


def _match_transfers(entry: _Entry) -> list[_Entry]:
    """The entries that are done, ``entry`` and those of other ranks, now that it is the first in its queue."""
    communicator, rank = entry.communicator, entry.thread.rank
    done = []
    for call in list(entry.unmatched):
        peer = _peer(communicator, rank, call)
        queue = communicator.queues[peer]
        other = queue[0] if queue else None
        if other is None or other.calls[0].kind not in TRANSFERS:
            continue
        kind = "recv" if call.kind == "send" else "send"
        matching = [one for one in other.unmatched if one.kind == kind and _peer(communicator, peer, one) == rank]
        if not matching:
            continue
        if (matching[0].elements, matching[0].dtype) != (call.elements, call.dtype):
            raise Counterexample(f"a transfer has two sizes:\n  rank {rank}: {call}\n  rank {peer}: {matching[0]}")
        entry.unmatched.remove(call)
        other.unmatched.remove(matching[0])
        if not other.unmatched:
            done.append(other)
    return done if entry.unmatched else [*done, entry]


def _peer(communicator: _Communicator, rank: int, call: Call) -> int:
    ranks = communicator.ranks
    return ranks[(communicator.places[rank] + call.peer) % len(ranks)]


def _explained(stuck: Sequence[_Thread], threads: Sequence[_Thread]) -> str:
    """The circle of ranks that wait for one another, or the chain that ends with a rank that does not come."""
    waiting = {thread.rank: thread for thread in stuck}
    thread, seen, lines = stuck[0], [], []
    while thread.rank not in seen:
        seen.append(thread.rank)
        others = _waited_for(thread)
        other = next((rank for rank in others if rank in waiting), others[0])
        entry = thread.awaited
        assert entry is not None
        lines.append(f"  rank {thread.rank} waits at {thread.waits_at} for rank {other} in {entry.calls[0]}")
        if other not in waiting:
            lines.append(f"  rank {other} has ended, and never calls it")
            return "a rank waits forever:\n" + "\n".join(lines)
        thread = waiting[other]
    begin = seen.index(thread.rank)
    return f"{len(seen) - begin} ranks wait for one another forever:\n" + "\n".join(lines[begin:])


def _waited_for(thread: _Thread) -> list[int]:
    """The ranks that have not come to where a thread waits."""
    entry = thread.awaited
    assert entry is not None
    communicator, rank = entry.communicator, thread.rank
    head = communicator.queues[rank][0]
    if head.calls[0].kind in TRANSFERS:
        return [_peer(communicator, rank, call) for call in head.unmatched]
    arrived = {one.thread.rank for one in communicator.arrived}
    return [other for other in communicator.ranks if other not in arrived] or [rank]


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} ranks from {ranks[0]}"
