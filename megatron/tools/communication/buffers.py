"""Tensors that are being sent or received, and what uses them meanwhile."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Buffer(NamedTuple):
    """A part of memory that belongs to an operation until something waits for it."""

    storage: StorageWeakRef
    begin: int
    end: int
    is_written: bool
    what: str


class BufferWatch:
    """Calls ``found`` with a line for each use of a buffer that is not waited for.

    Nothing may read or write what an operation writes, and nothing may write what it reads. Freed it may be: torch's
    process groups keep it until then.
    """

    def __init__(self, found: Callable[[str], None], place: Callable[[], str]):
        self._found, self._place = found, place
        self._under_way: dict[Any, list[_Buffer]] = {}
        self._by_storage: dict[int, list[_Buffer]] = {}

    def begin(self, number: Any, what: str, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Operation ``number`` writes and reads these tensors from now on."""
        if self._under_way:
            self._check([(x, True) for x in written] + [(x, False) for x in read])
        buffers = [_Buffer(StorageWeakRef(x.untyped_storage()), *_extent(x), True, what) for x in written]
        buffers += [_Buffer(StorageWeakRef(x.untyped_storage()), *_extent(x), False, what) for x in read]
        self._under_way[number] = buffers
        for buffer in buffers:
            self._by_storage.setdefault(buffer.storage.cdata, []).append(buffer)

    def end(self, number: Any) -> None:
        """Something waits for operation ``number``."""
        buffers = self._under_way.pop(number, [])
        for buffer in buffers:
            if not (same := self._by_storage[buffer.storage.cdata])[1:]:
                del self._by_storage[buffer.storage.cdata]
            else:
                same.remove(buffer)

    def finish(self) -> None:
        """The run has ended."""
        for buffers in self._under_way.values():
            if buffers:
                self._found(f"nothing waits for {buffers[0].what}")

    def computed(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Torch's operation ``func``, which makes no view, begins."""
        if self._under_way:
            self._check(_uses(func, args, kwargs))

    def _check(self, uses: Iterable[tuple[Tensor, bool]]) -> None:
        """``uses`` are tensors, and whether each is written."""
        for x, writes in uses:
            for buffer in self._by_storage.get(x.untyped_storage()._cdata, ()):
                begin, end = _extent(x)
                overlaps = begin < buffer.end and buffer.begin < end
                if overlaps and (writes or buffer.is_written) and not buffer.storage.expired():
                    use = "writes to" if writes else "reads"
                    direction = "receives" if buffer.is_written else "sends"
                    self._found(f"{self._place()} {use} what {buffer.what} {direction}, before a wait")


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    begin = int(x.storage_offset())
    return begin * x.element_size(), (begin + int(last) + 1) * x.element_size()


def _uses(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Tensor, bool]]:
    for number, (name, writes) in enumerate(_arguments(func)):
        value = args[number] if number < len(args) else kwargs.get(name)
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, Tensor):
                yield leaf, writes


@cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of the arguments, and whether they are written."""
    arguments = func._schema.arguments
    return [(one.name, one.alias_info is not None and one.alias_info.is_write) for one in arguments]
