# mypy: disable-error-code="override, assignment, method-assign"
"""A process group and a store of many ranks of which only one exists.

Every operation returns at once, with finite results of the right shape. Gathers return copies of the rank's own tensor.
Sums multiply small tensors (counts and losses) by the number of ranks, and leave large ones unchanged, since they
would grow through many layers. Received tensors are noise.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

NAME = "one_rank"
"""Name of the torch.distributed backend."""
_SMALL = 1024
"""Maximum number of elements of a tensor that a sum multiplies by the number of ranks."""
_LARGE = 2**40
"""Integers above this are taken for uninitialized memory, not for counts."""


class Operation(NamedTuple):
    """A call of a collective or transfer."""

    kind: str
    """Name, such as ``"all_reduce"``."""
    group: "OneRankGroup"
    written: Sequence[Tensor] = ()
    read: Sequence[Tensor] = ()
    peer: int | None = None
    """Rank in the group that is the root, the source or the destination."""
    detail: str = ""
    """Other arguments that must be equal on all ranks, such as the reduction."""


class Observer(Protocol):
    """Interface of an object that observes all operations."""

    def issued(self, operation: Operation) -> Any:
        """Called after the operation has run. The result is passed to ``waited``."""

    def waited(self, issued: Any) -> None:
        """Called when the program waits for an operation; ``issued`` is the result of ``issued()``."""

    def grouped(self, parts: Sequence[tuple[int, ...]], group: "OneRankGroup | None") -> None:
        """Called when groups of the ranks ``parts`` are created; ``group`` is this rank's group, or None."""


class FinishedWork(dist.Work):
    """Work handle of a finished operation."""

    def __init__(self, waited: Callable[[], None]):
        super().__init__()
        self._waited = waited

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True."""
        self._waited()
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


class OneRankGroup(dist.ProcessGroup):
    """Process group of ``ranks`` of which only this rank exists."""

    observer: Observer | None = None
    """Observer of the operations of all groups."""

    def __init__(self, rank: int, ranks: Sequence[int], name: str):
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # with a store, Python's methods are not called
        self.ranks, self.registered_name = tuple(ranks), name

    group_name = pg_name = property(lambda self: self.registered_name)
    """Name of the group in torch's registry."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # torch creates the tensors of pickled objects there

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """Name of this backend."""
        return NAME

    def do(self, deliver: Callable[[], Any], kind: str, *arguments: Any) -> FinishedWork:
        """Call ``deliver``, which writes results; notify the observer of ``Operation(kind, self, *arguments)``."""
        with torch.no_grad():
            deliver()
        observer = OneRankGroup.observer
        issued = None if observer is None else observer.issued(Operation(kind, self, *arguments))
        return FinishedWork(lambda: None if observer is None else observer.waited(issued))

    def barrier(self, opts: Any = None) -> FinishedWork:
        """Return at once."""
        return self.do(_nothing, "barrier")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """Multiply small tensors by the number of ranks in a sum; leave other tensors unchanged."""
        reduction = opts.reduceOp if opts is not None else ReduceOp.SUM

        def deliver() -> None:
            for x in tensors:
                if reduction == ReduceOp.SUM and x.numel() < _SMALL and x.dtype != torch.bool:
                    x.mul_(self.size())

        return self.do(deliver, "all_reduce", tensors, tensors, None, _name(reduction))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """Same as ``allreduce``."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """Leave the tensors unchanged."""
        root, reduction = (opts.rootRank, opts.reduceOp) if opts is not None else (0, ReduceOp.SUM)
        return self.do(_nothing, "reduce", tensors, tensors, root, _name(reduction))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """Leave plausible values unchanged, such as weights, which are equal on all ranks; clamp others."""
        root = opts.rootRank if opts is not None else 0
        received = [] if root == self.rank() else tensors

        def deliver() -> None:
            for x in received:
                if x.is_floating_point():
                    x.nan_to_num_(0, 0, 0).clamp_(-1, 1)
                elif x.dtype == torch.int64:
                    x.masked_fill_(x.abs() > _LARGE, 0)

        return self.do(deliver, "broadcast", received, [] if received else tensors, root)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> FinishedWork:
        """Return a copy of the rank's own tensor for every rank."""
        copies = ((part, own) for parts, own in zip(outputs, inputs, strict=True) for part in parts)
        return self.do(_copy(copies), "all_gather", [part for parts in outputs for part in parts], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> FinishedWork:
        """Gather into one tensor; if ``input`` is a part of ``output``, the other parts keep earlier values."""

        def deliver() -> None:
            if output.untyped_storage()._cdata != input.untyped_storage()._cdata:
                output.view(self.size(), -1).copy_(input.reshape(1, -1))

        return self.do(deliver, "all_gather", [output], [input])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> FinishedWork:
        """Return the rank's own part, without a sum."""
        copies = ((output, parts[self.rank()]) for output, parts in zip(outputs, inputs, strict=True))
        all_parts = [part for parts in inputs for part in parts]
        return self.do(_copy(copies), "reduce_scatter", outputs, all_parts, None, _reduction(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> FinishedWork:
        """Return the rank's own part of one tensor, without a sum."""

        def deliver() -> None:
            output.view(-1).copy_(input.reshape(self.size(), -1)[self.rank()])

        return self.do(deliver, "reduce_scatter", [output], [input], None, _reduction(opts))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> FinishedWork:
        """Return the sent elements, truncated or repeated to the size of ``output``."""
        detail = f"receiving {list(output_sizes)}, sending {list(input_sizes or [])}" if output_sizes else ""
        return self.do(lambda: _fill(output, input), "all_to_all", [output], [input], None, detail)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> FinishedWork:
        """Return the tensor sent to each rank, truncated or repeated to the size of the output."""

        def deliver() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                _fill(output, own)

        return self.do(deliver, "all_to_all", outputs, inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> FinishedWork:
        """Return a copy of the rank's own tensor for every rank at the root."""
        parts = [part for parts in outputs for part in parts]
        return self.do(_copy((part, inputs[0]) for part in parts), "gather", parts, inputs, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> FinishedWork:
        """Return the root's own part at the root, and noise on other ranks."""

        def deliver() -> None:
            outputs[0].copy_(inputs[0][self.rank()]) if inputs else _noise(outputs[0])

        return self.do(deliver, "scatter", outputs, [part for parts in inputs for part in parts], opts.rootRank)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> FinishedWork:
        """Return at once; no rank receives the tensor."""
        return self.do(_nothing, "send", [], tensors, destination)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> FinishedWork:
        """Return noise, or zeros for an integer type."""
        return self.do(lambda: _noise(tensors[0]), "recv", tensors, [], source)

    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single


def _nothing() -> None: ...


def _copy(copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """A function that copies each (target, source)."""

    def deliver() -> None:
        for target, source in copies:
            target.copy_(source)

    return deliver


def _name(reduction: Any) -> str:
    return str(getattr(reduction, "op", reduction)).rpartition(".")[2]


def _reduction(options: Any) -> str:
    return _name(ReduceOp.SUM if options is None else options.reduceOp)


def _fill(output: Tensor, source: Tensor) -> None:
    """Copy the elements of ``source`` into ``output``, truncated or repeated."""
    if output.numel() == source.numel():
        output.copy_(source.view(output.shape))
    elif source.numel() == 0:
        output.zero_()
    else:
        times = -(-output.numel() // source.numel())
        output.view(-1).copy_(source.reshape(-1).repeat(times)[: output.numel()])


_generators: dict[torch.device, torch.Generator] = {}
"""Generators of the noise, so that the generators of the run are not advanced."""


def _noise(x: Tensor) -> None:
    if not x.is_floating_point() or x.is_meta:
        x.zero_()
        return
    if x.device not in _generators:
        _generators[x.device] = torch.Generator(x.device)
    x.normal_(generator=_generators[x.device])


class OneRankStore(dist.Store):
    """Store in which all other ranks have set their keys, so that ``wait`` returns; ``get`` waits for this rank."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        """Set ``key``."""
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is set."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number ``key``."""
        with self._changed:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
            return number

    def check(self, keys: list[str]) -> bool:
        """Whether this rank has set all ``keys``."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once: the other ranks have set the keys."""

    def delete_key(self, key: str) -> bool:
        """Delete ``key``. Returns whether it was set."""
        return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout."""
