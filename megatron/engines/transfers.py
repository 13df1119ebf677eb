"""Tensors on their way between pipeline stages.

Two neighbors have a group in each direction (``ParallelLayout.p2p_groups``), which on a GPU has a stream: a transfer
follows earlier ones between the same stages in the same direction, and no others. A stage starts to receive early, and
waits before the pass that needs a tensor. It never waits for a receiver that is late.

DeepSpeed 0.19.8: runtime/pipe/p2p.py sends and receives blocking, all on the group of all ranks.
Test: tests/training/test_transfers.py, test_schedules_agree.py.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.simulation import Transfer


class Transfers:
    """Starts transfers, and waits for what arrives when it is taken."""

    most_sends = 0
    """Sends that may be under way, whose tensors are kept."""

    def __init__(self, layout: ParallelLayout, device: torch.device):
        self._layout, self._device, self._stage = layout, device, layout.pipe_group.rank()
        self._arriving: dict[Transfer, tuple[list[Work], Any]] = {}
        self._leaving: deque[tuple[list[Work], list[Tensor]]] = deque()
        self.forget_shapes()
        self._connect()

    def _connect(self) -> None:
        """Send a byte to each neighbor, since the hosts of two ranks wait for each other in NCCL's first transfer."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for source, target in self._layout.p2p_groups:
            if self._stage == source:
                dist.send(byte, *self._to(target))
            elif self._stage == target:
                dist.recv(byte, *self._from(source))

    def forget_shapes(self) -> None:
        """Exchange types and shapes again when a tensor next crosses a boundary between model chunks."""
        self._shapes: dict[tuple[bool, int], list[int]] = {}

    def send(self, one: Transfer, value: Any) -> None:
        """Start to send a tensor, or a tuple of tensors."""
        tensors = as_list(value)
        if not self.knows_shape(one):
            self._shapes[_boundary(one)] = row = _row(value)
            tensors = [torch.tensor(row, device=self._device), *tensors]
        self._leaving.append(([_started(dist.isend(tensor, *self._to(one.stage))) for tensor in tensors], tensors))
        self._wait_for_sends(self.most_sends)

    def knows_shape(self, one: Transfer) -> bool:
        """Whether tensors have crossed this boundary before; else ``receive`` waits for their shapes."""
        return _boundary(one) in self._shapes

    def receive(self, one: Transfer) -> None:
        """Start to receive."""
        if not self.knows_shape(one):
            self._shapes[_boundary(one)] = self._received_row(one.stage)
        value = _allocated(self._shapes[_boundary(one)], self._device)
        works = [_started(dist.irecv(tensor, *self._from(one.stage))) for tensor in as_list(value)]
        self._arriving[one] = works, value

    def take(self, one: Transfer) -> Any:
        """What has been received, in the form in which it was sent. Waits for it."""
        works, value = self._arriving.pop(one)
        for work in works:
            work.wait()
        return value

    def _received_row(self, stage: int) -> list[int]:
        row = torch.empty(_ROW, dtype=torch.int64, device=self._device)
        _started(dist.irecv(row, *self._from(stage))).wait()
        return row.tolist()

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

    def _to(self, stage: int) -> tuple[int, ProcessGroup]:
        return self._rank_of(stage), self._layout.p2p_groups[self._stage, stage]

    def _from(self, stage: int) -> tuple[int, ProcessGroup]:
        return self._rank_of(stage), self._layout.p2p_groups[stage, self._stage]

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self._layout.pipe_group, stage)


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank is in the group"
    return work


def as_list(tensors: Any) -> list[Tensor]:
    """A tensor, or the tensors of a tuple, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _boundary(one: Transfer) -> tuple[bool, int]:
    return one.is_forward, one.boundary


_ROW = 64
"""Numbers that describe what crosses a boundary."""


def _row(value: Any) -> list[int]:
    """What ``_allocated`` reads of ``value``; of 64 numbers."""
    numbers = [int(isinstance(value, tuple)), len(as_list(value))]
    for tensor in as_list(value):
        numbers += [PipelineEngine.DTYPE_TO_ID[tensor.dtype], tensor.dim(), *tensor.shape]
    assert len(numbers) <= _ROW, "too many tensors cross a boundary between stages"
    return numbers + [0] * (_ROW - len(numbers))


def _allocated(row: list[int], device: torch.device) -> Any:
    """An empty tensor, or a tuple of them, as ``_row`` describes."""
    is_tuple, count, *rest = row
    tensors = []
    for _ in range(count):
        dtype, dims, *rest = rest
        tensors.append(torch.empty(rest[:dims], dtype=PipelineEngine.ID_TO_DTYPE[dtype], device=device))
        rest = rest[dims:]
    return tuple(tensors) if is_tuple else tensors[0]
