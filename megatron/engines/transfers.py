"""Tensors between model chunks: asynchronous transfers between stages, and what the buffers of a stage hold.

Neighboring stages have a process group for each direction (``ParallelLayout.p2p_groups``), with its own stream on a
GPU: a transfer is ordered only with other transfers between the same stages in the same direction. A stage starts to
receive early, and waits before the pass that needs the tensor. It never waits for a late receiver.

DeepSpeed 0.19.8: runtime/pipe/p2p.py sends and receives blocking, on the group of all ranks.
Test: tests/training/test_transfers.py, test_schedules_agree.py.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup, Work

from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.program import Transfer


class Transfers:
    """Starts sends and receives, and waits for received tensors in ``take``."""

    most_sends = 0
    """Maximum number of unfinished sends, whose tensors are kept."""

    def __init__(self, layout: ParallelLayout, device: torch.device):
        self._layout, self._device, self._stage = layout, device, layout.pipe_group.rank()
        self._arriving: dict[Transfer, tuple[list[Work], Any]] = {}
        self._leaving: deque[tuple[list[Work], list[Tensor]]] = deque()
        self.forget_shapes()
        self._connect()

    def _connect(self) -> None:
        """Send a byte to each neighbor: NCCL's first transfer between two ranks blocks both hosts."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for source, target in self._layout.p2p_groups:
            if self._stage == source:
                dist.send(byte, *self._to(target))
            elif self._stage == target:
                dist.recv(byte, *self._from(source))

    def forget_shapes(self) -> None:
        """Forget dtypes and shapes, so that the next transfer across each chunk boundary exchanges them again."""
        self._shapes: dict[tuple[bool, int], list[int]] = {}

    def send(self, transfer: Transfer, value: Any) -> None:
        """Start to send a tensor, or a tuple of tensors."""
        tensors = as_list(value)
        if not self.knows_shape(transfer):
            self._shapes[_boundary(transfer)] = row = _shape_row(value)
            tensors = [torch.tensor(row, device=self._device), *tensors]
        works = [_started(dist.isend(tensor, *self._to(transfer.stage))) for tensor in tensors]
        self._leaving.append((works, tensors))
        self._wait_for_sends(self.most_sends)

    def knows_shape(self, transfer: Transfer) -> bool:
        """Whether the shapes at this chunk boundary are known; otherwise ``receive`` waits for them."""
        return _boundary(transfer) in self._shapes

    def receive(self, transfer: Transfer) -> None:
        """Start to receive."""
        if not self.knows_shape(transfer):
            self._shapes[_boundary(transfer)] = self._received_row(transfer.stage)
        value = _allocated(self._shapes[_boundary(transfer)], self._device)
        works = [_started(dist.irecv(tensor, *self._from(transfer.stage))) for tensor in as_list(value)]
        self._arriving[transfer] = works, value

    def take(self, transfer: Transfer) -> Any:
        """Wait for a started receive. Returns a tensor or tuple, as it was sent."""
        works, value = self._arriving.pop(transfer)
        for work in works:
            work.wait()
        return value

    def _received_row(self, stage: int) -> list[int]:
        row = torch.empty(_ROW, dtype=torch.int64, device=self._device)
        _started(dist.irecv(row, *self._from(stage))).wait()
        return row.tolist()

    def finish(self) -> None:
        """Wait for all sends."""
        self._wait_for_sends(0)
        assert not self._arriving, "every tensor is taken"

    def _wait_for_sends(self, most: int) -> None:
        """Release finished sends, and wait for the oldest beyond ``most``; gloo reports completion only in wait."""
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
    """A tensor or a tuple of tensors as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _boundary(transfer: Transfer) -> tuple[bool, int]:
    return transfer.is_forward, transfer.boundary


_ROW = 64
"""Length of the message that describes the tensors of a transfer."""


def _shape_row(value: Any) -> list[int]:
    """Describe the dtypes and shapes of ``value`` in 64 numbers, which ``_allocated`` reads."""
    numbers = [int(isinstance(value, tuple)), len(as_list(value))]
    for tensor in as_list(value):
        numbers += [PipelineEngine.DTYPE_TO_ID[tensor.dtype], tensor.dim(), *tensor.shape]
    assert len(numbers) <= _ROW, "too many tensors cross a boundary between stages"
    return numbers + [0] * (_ROW - len(numbers))


def _allocated(row: list[int], device: torch.device) -> Any:
    """Allocate an empty tensor, or a tuple of them, as described by ``_shape_row``."""
    is_tuple, count, *rest = row
    tensors = []
    for _ in range(count):
        dtype, dims, *rest = rest
        tensors.append(torch.empty(rest[:dims], dtype=PipelineEngine.ID_TO_DTYPE[dtype], device=device))
        rest = rest[dims:]
    return tuple(tensors) if is_tuple else tensors[0]


class ChunkOutput:
    """Gradient edges of a chunk's output, to start its backward pass without keeping the output's memory.

    DeepSpeed uses it, and ``ChunkInput``, like a tensor. One backward pass runs for all tensors of a tuple; DeepSpeed
    would run one for each, which repeats shared layers and fails for recomputed ones.
    Test: tests/training/test_t5_layouts_agree.py.
    """

    def __init__(self, value: Any):
        self._edges = [get_gradient_edge(tensor) for tensor in as_list(value) if tensor.is_floating_point()]

    def backward(self, gradient: Any) -> None:
        """Run the backward pass from the gradients of all floating-point tensors."""
        torch.autograd.backward(self._edges, as_list(gradient))


class ChunkInput:
    """An input tensor that collects its gradient; layers get a view of it instead of DeepSpeed's copy.

    They must not get the tensor itself: DeepSpeed's partitioned activation checkpointing replaces its data.
    """

    def __init__(self, value: Tensor):
        self.tensor = value.detach().requires_grad_(value.is_floating_point())

    def clone(self) -> Tensor:
        """A view instead of the copy that DeepSpeed asks for."""
        return self.tensor.view_as(self.tensor)


def as_inputs(outputs: Any) -> Any:
    """Wrap outputs of a chunk, or tokens of a micro-batch, as inputs of the next chunk."""
    return ChunkInput(outputs) if isinstance(outputs, Tensor) else tuple(map(ChunkInput, outputs))


def gradients_of(inputs: Any) -> Any:
    """The gradient of an input, or the gradients of all floating-point inputs of a tuple."""
    gradients = []
    for wrapped in inputs if isinstance(inputs, tuple) else (inputs,):
        if wrapped.tensor.is_floating_point():
            assert wrapped.tensor.grad is not None
            gradients.append(wrapped.tensor.grad)
    return tuple(gradients) if isinstance(inputs, tuple) else gradients[0]
