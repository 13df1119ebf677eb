# mypy: disable-error-code="override, assignment, method-assign"
"""A process group of many ranks of which only one exists, and a store in which the others have always arrived.

Every operation returns at once. What it delivers is finite and of the right shape: gathered is the rank's own tensor
from every rank, summed is a tensor with itself if it is small (counts and losses) and else with nothing, as large sums,
through many layers, would grow; received is noise.
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
"""Of the backend."""
_SMALL = 1024
"""Elements of a tensor whose sum over equal ranks is delivered."""
_LARGE = 2**40
"""No number of elements, but what memory may hold that was never written."""


class Operation(NamedTuple):
    """A call of an operation of a process group."""

    kind: str
    """Such as ``"all_reduce"``."""
    group: "OneRankGroup"
    written: Sequence[Tensor] = ()
    read: Sequence[Tensor] = ()
    peer: int | None = None
    """Rank in the group that is the root, the source or the destination."""
    detail: str = ""
    """What all ranks must agree on besides sizes and types, such as the reduction."""


class Observer(Protocol):
    """Is told of every operation."""

    def issued(self, operation: Operation) -> Any:
        """Called when its data is delivered. The result names the operation when it is waited for."""

    def waited(self, issued: Any) -> None:
        """Called when the work of an operation is waited for."""

    def grouped(self, parts: Sequence[tuple[int, ...]], group: "OneRankGroup | None") -> None:
        """Called when groups are made, of which ``group`` is this rank's; None if it is in none."""


class FinishedWork(dist.Work):
    """Of an operation of one rank, which has ended."""

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
    """A process group of ``ranks`` as one of them sees it. ``observer`` is told what is done in any of them."""

    observer: Observer | None = None

    def __init__(self, rank: int, ranks: Sequence[int], name: str):
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # with a store, Python's methods are not called
        self.ranks, self.registered_name = tuple(ranks), name

    group_name = pg_name = property(lambda self: self.registered_name)
    """Its name in torch's registry."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # where torch puts objects that it sends

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """Of this backend."""
        return NAME

    def do(self, deliver: Callable[[], Any], kind: str, *arguments: Any) -> FinishedWork:
        """Deliver, and tell the observer of the ``Operation`` with these ``arguments``."""
        with torch.no_grad():
            deliver()
        observer = OneRankGroup.observer
        issued = None if observer is None else observer.issued(Operation(kind, self, *arguments))
        return FinishedWork(lambda: None if observer is None else observer.waited(issued))

    def barrier(self, opts: Any = None) -> FinishedWork:
        """Nothing to wait for."""
        return self.do(_nothing, "barrier")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """A sum of a few elements with themselves; other tensors stay as they are."""
        reduction = opts.reduceOp if opts is not None else ReduceOp.SUM

        def deliver() -> None:
            for x in tensors:
                if reduction == ReduceOp.SUM and x.numel() < _SMALL and x.dtype != torch.bool:
                    x.mul_(self.size())

        return self.do(deliver, "all_reduce", tensors, tensors, None, _name(reduction))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """As ``allreduce``."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """The tensors stay as they are."""
        root, reduction = (opts.rootRank, opts.reduceOp) if opts is not None else (0, ReduceOp.SUM)
        return self.do(_nothing, "reduce", tensors, tensors, root, _name(reduction))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> FinishedWork:
        """What is there, if it is plausible: weights, which all ranks have drawn alike, stay."""
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
        """The rank's own tensor from every rank."""
        copies = ((part, own) for parts, own in zip(outputs, inputs, strict=True) for part in parts)
        return self.do(_copied(copies), "all_gather", [part for parts in outputs for part in parts], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> FinishedWork:
        """The same into one tensor; one that has this rank's part already has earlier ones of the others, too."""

        def deliver() -> None:
            if output.untyped_storage()._cdata != input.untyped_storage()._cdata:
                output.view(self.size(), -1).copy_(input.reshape(1, -1))

        return self.do(deliver, "all_gather", [output], [input])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> FinishedWork:
        """The rank's own part."""
        copies = ((output, parts[self.rank()]) for output, parts in zip(outputs, inputs, strict=True))
        every = [part for parts in inputs for part in parts]
        return self.do(_copied(copies), "reduce_scatter", outputs, every, None, _of(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> FinishedWork:
        """The same of one tensor."""

        def deliver() -> None:
            output.view(-1).copy_(input.reshape(self.size(), -1)[self.rank()])

        return self.do(deliver, "reduce_scatter", [output], [input], None, _of(opts))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> FinishedWork:
        """From each rank what this one sends to it, as far as it is that much, and then again."""
        detail = f"receiving {list(output_sizes)}, sending {list(input_sizes or [])}" if output_sizes else ""
        return self.do(lambda: _fill(output, input), "all_to_all", [output], [input], None, detail)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> FinishedWork:
        """The same with a tensor for each rank."""

        def deliver() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                _fill(output, own)

        return self.do(deliver, "all_to_all", outputs, inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> FinishedWork:
        """At the root, the rank's own tensor from every rank."""
        parts = [part for parts in outputs for part in parts]
        return self.do(_copied((part, inputs[0]) for part in parts), "gather", parts, inputs, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> FinishedWork:
        """At the root its own part; else noise."""

        def deliver() -> None:
            outputs[0].copy_(inputs[0][self.rank()]) if inputs else _noise(outputs[0])

        return self.do(deliver, "scatter", outputs, [part for parts in inputs for part in parts], opts.rootRank)

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> FinishedWork:
        """Nobody receives."""
        return self.do(_nothing, "send", [], tensors, destination)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> FinishedWork:
        """Noise, or zeros of a whole number's type."""
        return self.do(lambda: _noise(tensors[0]), "recv", tensors, [], source)

    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single


def _nothing() -> None: ...


def _copied(copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Copies the second of each pair of tensors into the first, once it is called."""

    def deliver() -> None:
        for target, source in copies:
            target.copy_(source)

    return deliver


def _name(reduction: Any) -> str:
    return str(getattr(reduction, "op", reduction)).rpartition(".")[2]


def _of(options: Any) -> str:
    return _name(ReduceOp.SUM if options is None else options.reduceOp)


def _fill(output: Tensor, source: Tensor) -> None:
    """Copy the elements of ``source`` into ``output``, from the first again where they end."""
    if output.numel() == source.numel():
        output.copy_(source.view(output.shape))
    elif source.numel() == 0:
        output.zero_()
    else:
        times = -(-output.numel() // source.numel())
        output.view(-1).copy_(source.reshape(-1).repeat(times)[: output.numel()])


_generators: dict[torch.device, torch.Generator] = {}
"""Of the noise; those of the run go on as if there were none."""


def _noise(x: Tensor) -> None:
    if not x.is_floating_point() or x.is_meta:
        x.zero_()
        return
    if x.device not in _generators:
        _generators[x.device] = torch.Generator(x.device)
    x.normal_(generator=_generators[x.device])


class OneRankStore(dist.Store):
    """A store on which every other rank has set what is waited for; ``get`` waits for this one."""

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
        """Whether this rank has set all of them."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return: others have set them."""

    def delete_key(self, key: str) -> bool:
        """Whether ``key`` was set."""
        return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for."""
