"""Deadlock check: simulates the communication in the traces of all ranks by the rules of NCCL.

Each communicator has a queue per rank, whose operations run one after the other, in the order of the calls. A
collective runs when it is the first entry in the queue of every rank of its group, and is the same operation there. A
transfer runs when it is the first entry on both ranks, since no send is buffered. A batch of transfers is one entry,
whose transfers run together. A rank issues a call when all earlier waits are over.

A collective blocks the rank that calls it, even if the program does not wait for it: if two ranks use two communicators
in opposite orders, they can deadlock on GPUs whose streams are serialized. A transfer blocks only where the program
waits for it, since receives between two stages may be posted early.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TRANSFERS = ("send", "recv")
"""Point-to-point operations; all other operations are collectives."""


class Call(NamedTuple):
    """A call of a collective or transfer. Equal calls of a rank are one object."""

    kind: str
    group: int
    """Number of the group among the groups of the rank, in the order of their creation; 0 is the default group."""
    elements: int
    dtype: str
    size: int
    """Bytes that the rank contributes, or receives in a transfer."""
    peer: int
    """Transfer: rank in the group of the peer minus the own one. Collective: rank in the group of the root, or -1."""
    detail: str
    phase: str
    location: str
    """``FILE:LINE FUNCTION`` of the call."""

    @property
    def signature(self) -> tuple:
        """The properties that must be equal on all ranks of the group."""
        return self.kind, self.elements, self.dtype, self.peer, self.detail

    def __str__(self) -> str:
        size = f" of {self.elements:,} {self.dtype}" if self.dtype else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{size}{detail} at {self.location}"


class Issue(NamedTuple):
    """A call, or a batch of transfers that are issued together."""

    calls: tuple[Call, ...]
    blocks: bool
    """Whether the rank continues only when all calls are done."""


class Wait(NamedTuple):
    """A wait for the calls of an ``Issue``."""

    issue: int
    """Index of the ``Issue`` in the events of the thread."""
    location: str


Event = Issue | Wait


@dataclass
class Trace:
    """The recorded communication of one rank."""

    rank: int
    groups: list[tuple[int, ...]] = field(default_factory=list)
    """The ranks of every group in the order of creation, including groups without this rank."""
    threads: dict[str, list[Event]] = field(default_factory=dict)
    """Events by the name of the thread."""
    faults: list[str] = field(default_factory=list)
    """Errors on this rank: buffers that are used while they are sent or received."""
    exit_code: int = 0


def groups_of_ranks(groups: Sequence[tuple[int, ...]], world_size: int) -> list[list[int]]:
    """For each rank, the indices in ``groups`` of the groups that it is in."""
    memberships: list[list[int]] = [[] for _ in range(world_size)]
    for number, ranks in enumerate(groups):
        for rank in ranks:
            memberships[rank].append(number)
    return memberships


class Program(NamedTuple):
    """The communication of a rank: events of its representative, on the rank's own groups."""

    rank: int
    threads: Sequence[Sequence[Event]]
    groups: Sequence[tuple]
    """For each group a key that is the same on all of its ranks, and its ranks."""


class Counterexample(Exception):  # noqa: N818
    """A deadlock, with a description."""


def programs(traces: Sequence[Trace]) -> list[Program]:
    """The program of every rank; ``traces`` has the trace of the representative of each rank."""
    every_program: list[Program] = []
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
        every_program.append(Program(rank, threads, groups))
    return every_program


def _named(groups: Sequence[tuple[int, ...]]) -> list[tuple]:
    """(key, ranks) of each group; keys of groups with the same ranks differ in a number."""
    seen: dict[tuple[int, ...], int] = {}
    names = []
    for ranks in groups:
        seen[ranks] = seen.get(ranks, 0) + 1
        names.append(((ranks, seen[ranks]), ranks))
    return names


class _Communicator:
    """A group of ranks, with the queue of each rank and the ranks that have reached the next collective."""

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks = ranks
        self.group_ranks = {rank: group_rank for group_rank, rank in enumerate(ranks)}
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
    """The state of a thread of a rank in the simulation."""

    __slots__ = ("awaited", "entries", "events", "groups", "position", "rank", "waits_at")

    def __init__(self, rank: int, events: Sequence[Event], groups: list[_Communicator]):
        self.rank, self.events, self.groups = rank, events, groups
        self.position = 0
        self.entries: dict[int, _Entry] = {}
        self.awaited: _Entry | None = None
        self.waits_at = ""


def check(ranks: Sequence[Program]) -> None:
    """Simulate all ranks. Raises Counterexample if not all of them can reach their ends."""
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
        raise Counterexample(_explain(stuck))
    for communicator in communicators.values():
        for rank, queue in communicator.queues.items():
            if queue:
                raise Counterexample(f"rank {rank} ends, and no other rank takes part in its {queue[0].calls[0]}")


def _advance(thread: _Thread, runnable: deque[_Thread]) -> None:
    """Run a thread until it waits or ends."""
    thread.awaited = None
    events, entries = thread.events, thread.entries
    while thread.position < len(events):
        event = events[thread.position]
        if isinstance(event, Wait):
            entry = entries.get(event.issue)
            if entry is not None and not entry.is_done:
                thread.awaited, thread.waits_at = entry, event.location
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
            thread.awaited, thread.waits_at = entry, entry.calls[0].location
            return
        if event.blocks:
            del entries[thread.position]
        thread.position += 1


def _reach(entry: _Entry, runnable: deque[_Thread]) -> None:
    """Handle that ``entry`` has become the first of its queue: finish all entries that can run now."""
    heads = deque([entry])
    while heads:
        head = heads.popleft()
        done = _match_transfers(head) if head.calls[0].kind in TRANSFERS else _arrive(head)
        for finished in done:
            finished.is_done = True
            queue = finished.communicator.queues[finished.thread.rank]
            queue.popleft()
            if queue:
                heads.append(queue[0])
            if finished.thread.awaited is finished:
                finished.thread.awaited = None
                runnable.append(finished.thread)


def _arrive(entry: _Entry) -> Sequence[_Entry]:
    """Let a rank reach a collective. Returns the entries of all ranks if this was the last one, else none."""
    communicator, call = entry.communicator, entry.calls[0]
    if communicator.arrived:
        first = communicator.arrived[0]
        if first.calls[0] is not call and first.calls[0].signature != call.signature:
            raise Counterexample(
                f"ranks {first.thread.rank} and {entry.thread.rank} call different operations as number "
                f"{communicator.number + 1} of their group of {_shortened(communicator.ranks)}, in {call.phase}:\n"
                f"  rank {first.thread.rank}: {first.calls[0]}\n  rank {entry.thread.rank}: {call}"
            )
    communicator.arrived.append(entry)
    if len(communicator.arrived) < len(communicator.ranks):
        return ()
    done, communicator.arrived = communicator.arrived, []
    communicator.number += 1
    return done


def _match_transfers(entry: _Entry) -> list[_Entry]:
    """Match the transfers of ``entry``, the first of its queue. Returns the entries, of any rank, that are now done."""
    communicator, rank = entry.communicator, entry.thread.rank
    done = []
    for call in list(entry.unmatched):
        peer = _peer(communicator, rank, call)
        queue = communicator.queues[peer]
        other = queue[0] if queue else None
        if other is None or other.calls[0].kind not in TRANSFERS:
            continue
        kind = "recv" if call.kind == "send" else "send"
        matching = [
            candidate
            for candidate in other.unmatched
            if candidate.kind == kind and _peer(communicator, peer, candidate) == rank
        ]
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
    return ranks[(communicator.group_ranks[rank] + call.peer) % len(ranks)]


def _explain(stuck: Sequence[_Thread]) -> str:
    """Describe the cycle of ranks that wait for each other, or the chain that ends with a rank that has ended."""
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
    """The ranks that have not reached the operation that a thread waits for."""
    entry = thread.awaited
    assert entry is not None
    communicator, rank = entry.communicator, thread.rank
    head = communicator.queues[rank][0]
    if head.calls[0].kind in TRANSFERS:
        return [_peer(communicator, rank, call) for call in head.unmatched]
    arrived = {entry.thread.rank for entry in communicator.arrived}
    return [other for other in communicator.ranks if other not in arrived] or [rank]


def _shortened(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} ranks from {ranks[0]}"
