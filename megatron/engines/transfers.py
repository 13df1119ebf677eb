"""Tensors on their way between pipeline stages that run a schedule of ``megatron.parallel.pipeline.simulation``.

DeepSpeed 0.19.8: runtime/pipe/p2p.py sends and receives blocking, so that a stage waits for neighbors whose tensors it
does not need yet.
Test: tests/training/test_schedules_agree.py. Remove together with ``megatron.engines.schedules``.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megatron.parallel.pipeline.simulation import Transfer


class _Arriving(NamedTuple):
    works: list[dist.Work]
    tensors: list[Tensor]
    is_tuple: bool


class Transfers:
    """Starts transfers, and waits for what arrives when it is taken.

    ``rank_of`` maps a stage to its rank among all ranks. A rank has at most ``most_sends`` sends under way, whose
    tensors it keeps.
    """

    def __init__(self, rank_of: Callable[[int], int], device: torch.device, most_sends: int):
        self._rank_of, self._device, self._most_sends = rank_of, device, most_sends
        self._arriving: dict[tuple[bool, int, int], _Arriving] = {}
        self._leaving: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self.forget_shapes()

    def forget_shapes(self) -> None:
        """Exchange types and shapes again when a tensor next crosses a boundary between model chunks."""
        self._shapes: dict[tuple[bool, int], list[int]] = {}

    def start(self, transfers: Sequence[Transfer], sent: Callable[[Transfer], Any]) -> None:
        """Start ``transfers`` together; ``sent`` returns what one of them sends: a tensor, or a tuple of tensors."""
        values = {one: sent(one) for one in transfers if one.is_send}
        self._exchange_shapes([one for one in transfers if _boundary(one) not in self._shapes], values)
        ends = []
        for one in transfers:
            value = values[one] if one.is_send else _allocated(self._shapes[_boundary(one)], self._device)
            ends.append((one, as_list(value), isinstance(value, tuple)))
        works = self._started([(one, tensor) for one, tensors, _ in ends for tensor in tensors])
        for one, tensors, is_tuple in ends:
            own = [works.pop(0) for _ in tensors] if len(works) > 1 else works  # NCCL has one work for all of them
            if one.is_send:
                self._leaving.append((own, tensors))
            else:
                self._arriving[one.is_forward, one.chunk, one.micro_batch] = _Arriving(own, tensors, is_tuple)
        self._wait_for_sends(self._most_sends)

    def take(self, is_forward: bool, chunk: int, micro_batch: int) -> Any:
        """What has been received for a micro-batch in a chunk, in the form in which it was sent. Waits for it."""
        works, tensors, is_tuple = self._arriving.pop((is_forward, chunk, micro_batch))
        for work in works:
            work.wait()
        return tuple(tensors) if is_tuple else tensors[0]

    def finish(self) -> None:
        """Wait until all is sent."""
        self._wait_for_sends(0)
        assert not self._arriving, "every tensor is taken"

    def _wait_for_sends(self, most: int) -> None:
        """Let go of what has left, and of the oldest sends beyond ``most``; gloo says so only to those who wait."""
        while self._leaving:
            works, _ = self._leaving[0]
            if len(self._leaving) <= most and not all(work.is_completed() for work in works):
                return
            for work in works:
                work.wait()
            self._leaving.popleft()

    def _exchange_shapes(self, transfers: Sequence[Transfer], values: dict[Transfer, Any]) -> None:
        rows = [(one, _row(values.get(one)).to(self._device)) for one in transfers]
        for work in self._started(rows) if rows else ():
            work.wait()
        self._shapes |= {_boundary(one): row.tolist() for one, row in rows}

    def _started(self, ends: Sequence[tuple[Transfer, Tensor]]) -> list[dist.Work]:
        operations = []
        for one, tensor in ends:
            operations.append(dist.P2POp(dist.isend if one.is_send else dist.irecv, tensor, self._rank_of(one.stage)))
        return dist.batch_isend_irecv(operations)


def as_list(tensors: Any) -> list[Tensor]:
    """A tensor, or the tensors of a tuple, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _boundary(one: Transfer) -> tuple[bool, int]:
    return one.is_forward, one.boundary


_ROW = 64
"""Numbers that describe what crosses a boundary."""


def _row(value: Any) -> Tensor:
    """What ``_allocated`` reads of ``value``, int64 [64]; zeros for None."""
    numbers = []
    if value is not None:
        numbers = [int(isinstance(value, tuple)), len(as_list(value))]
        for tensor in as_list(value):
            numbers += [PipelineEngine.DTYPE_TO_ID[tensor.dtype], tensor.dim(), *tensor.shape]
    assert len(numbers) <= _ROW, "too many tensors cross a boundary between stages"
    return torch.tensor(numbers + [0] * (_ROW - len(numbers)), dtype=torch.int64)


def _allocated(row: list[int], device: torch.device) -> Any:
    """An empty tensor, or a tuple of them, as ``_row`` describes."""
    is_tuple, count, *rest = row
    tensors = []
    for _ in range(count):
        dtype, dims, *rest = rest
        tensors.append(torch.empty(rest[:dims], dtype=PipelineEngine.ID_TO_DTYPE[dtype], device=device))
        rest = rest[dims:]
    return tuple(tensors) if is_tuple else tensors[0]
