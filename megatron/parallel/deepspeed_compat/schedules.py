"""DeepSpeed's pipeline engine with further schedules: interleaved 1F1B and zero bubble.

A subclass of DeepSpeed's engine with its own instructions, as DeepSpeed's DualPipeV engine is one, and not
torch.distributed.pipelining under DeepSpeed's optimizer: the subclass keeps DeepSpeed's loss scale, ZeRO, bf16 sums in
fp32, tied weights, evaluation and checkpoints as they are, and replaces only which tensors go where and when. torch's
stages would need a second path for each of these, and divide a backward pass by walking through its graph, which fails
for recomputed layers; here the linear layers put off their own products (``megatron.parallel.tensor.deferred``).

DeepSpeed 0.19.8: runtime/pipe/engine.py knows one model chunk per stage and one schedule, dualpipev.py two chunks and
one schedule; ``deepspeed.initialize`` chooses between the two engines by the class of the module.
Test: tests/training/test_schedules_agree.py. Remove when DeepSpeed has these schedules.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
)
from torch import Tensor

from megatron.parallel.deepspeed_compat.engine import ExplicitPipelineModule, replaced
from megatron.parallel.pipeline.program import Step, Transfer, program
from megatron.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    Schedule,
)
from megatron.parallel.tensor.deferred import DeferredProducts, run_products


class BackwardInputPass(BufferOpInstruction):
    """The part of a backward pass that computes the gradients of a chunk's inputs."""


class BackwardWeightPass(BufferOpInstruction):
    """The rest of it: the gradients of the weights of linear layers."""


class ChunkedPipelineModule(ExplicitPipelineModule):
    """A pipeline module with the model chunks that ``schedule`` gives to each stage; one is exposed at a time."""

    schedule: Schedule
    """A subclass sets it before anything else. Its number of micro-batches does not matter here."""

    def _partition_layers(self, method: str) -> None:
        assert self.parts[-1] == self._num_layers and len(self.parts) - 1 == self.num_stages * self.schedule.chunks
        self.chunks = self.schedule.chunks_of(self.stage_id)

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer, by its number in the model."""
        chunk = next(number for number, end in enumerate(self.parts[1:]) if layer_idx < end)
        return self.schedule.stage_of(chunk)

    def _build(self) -> None:
        self._layers_of_chunks: list[list[Any]] = []
        for chunk in self.chunks:
            self._set_bounds(self.parts[chunk], self.parts[chunk + 1])
            self.forward_funcs: list[Any] = []
            super()._build()
            self._layers_of_chunks.append(self.forward_funcs)
        self.expose(0)

    def expose(self, number: int) -> None:
        """Let ``forward`` run the chunk of this number among those of the stage."""
        self.forward_funcs = self._layers_of_chunks[number]
        chunk = self.chunks[number]
        self._set_bounds(self.parts[chunk], self.parts[chunk + 1])

    def save_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Write the layers of all chunks."""
        for number in range(len(self.chunks)):
            self.expose(number)
            super().save_state_dict(*arguments, **options)

    def load_state_dir(self, *arguments: Any, **options: Any) -> None:
        """Read the layers of all chunks."""
        for number in range(len(self.chunks)):
            self.expose(number)
            super().load_state_dir(*arguments, **options)


def scheduled_pipeline_engine() -> AbstractContextManager[None]:
    """While inside, ``deepspeed.initialize`` makes a ``ScheduledPipelineEngine`` of a pipeline module."""
    return replaced(deepspeed, PipelineEngine=ScheduledPipelineEngine)


class _Instructions(NamedTuple):
    """A schedule as DeepSpeed's engine reads it."""

    steps: list[list[PipeInstruction]]
    buffers: int

    def num_pipe_buffers(self) -> int:
        return self.buffers

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.steps)


class _Arriving(NamedTuple):
    works: list[dist.Work]
    tensors: list[Tensor]
    is_tuple: bool


class ScheduledPipelineEngine(PipelineEngine):
    """Runs the schedule of a ``ChunkedPipelineModule``.

    A buffer belongs to a micro-batch in a chunk: number of the chunk in the stage x micro-batches + micro-batch.
    """

    _chunk: int | None = None
    """The model chunk that runs now."""
    _is_ready = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        assert not (self.is_pipe_partitioned or self.is_grad_partitioned or self.dynamic_shape)
        assert not (self.has_attention_mask or self.has_bool_tensors)
        self._is_ready = True
        self._forget_shapes()
        self._arriving: dict[tuple[bool, int], _Arriving] = {}
        self._leaving: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self._deferred = DeferredProducts(self.module.parameters()) if self._splits_backward else None
        self.pipe_buffers.update(losses=[], gradients=[], products=[])

    @property
    def _schedule(self) -> Schedule:
        return replace(self.module.schedule, micro_batches=self.micro_batches)

    @property
    def _splits_backward(self) -> bool:
        kinds = {action.kind for action in self._schedule.actions(self.stage_id)}
        return WEIGHT_GRADIENTS in kinds

    @property
    def _last_chunk(self) -> int:
        schedule = self.module.schedule
        return schedule.stages * schedule.chunks - 1

    def is_last_stage(self) -> bool:
        """Whether the chunk that runs is the last; outside of passes, whether this stage holds it."""
        if not self._is_ready:  # DeepSpeed's constructor asks for the place of the stage
            return super().is_last_stage()
        return self._last_chunk in self.module.chunks if self._chunk is None else self._chunk == self._last_chunk

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.module.schedule.stage_of(self._last_chunk))

    def reset_activation_shape(self) -> None:
        """Exchange the shapes of tensors between chunks anew."""
        super().reset_activation_shape()
        self._forget_shapes()

    def _forget_shapes(self) -> None:
        self._shapes: dict[int, Tensor] = {}

    def _train_schedule(self) -> _Instructions:
        instructions = self._instructions(program(self._schedule, self.stage_id))
        instructions.steps.append([ReduceTiedGrads(), ReduceGrads(), OptimizerStep()])
        return instructions

    def _inference_schedule(self, micro_batches: int) -> _Instructions:
        assert micro_batches == self.micro_batches
        return self._instructions(program(self._schedule, self.stage_id, forward_only=True))

    def _instructions(self, steps: Sequence[Step]) -> _Instructions:
        lowered = [self._of_pass(step) if isinstance(step, Action) else [CommitP2P(transfers=step)] for step in steps]
        return _Instructions(lowered, len(self.module.chunks) * self.micro_batches)

    def _of_pass(self, action: Action) -> list[PipeInstruction]:
        """A pass, after what it waits for."""
        chunk, kind, number = action
        phase = self.module.chunks.index(chunk)
        place = {"buffer_id": self._buffer(chunk, number), "phase": phase, "micro_batch": number + 1}
        if kind == FORWARD:
            before = [RecvActivation(**place)] if self._is_elsewhere(chunk - 1) else []
            # The stage that holds both ends of the model reads each micro-batch once.
            if chunk == 0 or (chunk == self._last_chunk and 0 not in self.module.chunks):
                before.append(LoadMicroBatch(**{**place, "phase": None}))
            return [*before, ForwardPass(**place)]
        if kind == WEIGHT_GRADIENTS:
            return [BackwardWeightPass(**place)]
        before = [RecvGrad(**place)] if self._is_elsewhere(chunk + 1) else []
        return [*before, {BACKWARD: BackwardPass, INPUT_GRADIENTS: BackwardInputPass}[kind](**place)]

    def _buffer(self, chunk: int, micro_batch: int) -> int:
        return self.module.chunks.index(chunk) * self.micro_batches + micro_batch

    def _is_elsewhere(self, chunk: int) -> bool:
        """Whether there is such a chunk, on another stage."""
        return 0 <= chunk <= self._last_chunk and chunk not in self.module.chunks

    def _exec_schedule(self, pipe_schedule: _Instructions) -> None:
        super()._exec_schedule(pipe_schedule)
        self._wait_for_sends(0)
        assert not self._arriving

    @contextmanager
    def _running(self, phase: int) -> Iterator[int]:
        """While inside, the module and the engine are those of one chunk: its number in the model."""
        self._chunk = self.module.chunks[phase]
        self.module.expose(phase)
        try:
            yield self._chunk
        finally:
            self._chunk = None

    def _exec_load_micro_batch(self, buffer_id: int, micro_batch: int, phase: None) -> None:
        super()._exec_load_micro_batch(buffer_id)
        if self.is_last_stage():
            labels, buffer = self.pipe_buffers["labels"], self._buffer(self._last_chunk, micro_batch - 1)
            loaded, labels[buffer_id] = labels[buffer_id], None
            labels[buffer] = loaded

    def _exec_forward_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        buffers = self.pipe_buffers
        with self._running(phase) as chunk:
            super()._exec_forward_pass(buffer_id)
        outputs, trains = buffers["outputs"][buffer_id], torch.is_grad_enabled()
        if chunk == self._last_chunk:
            buffers["losses"][buffer_id] = self.loss if trains else None
            buffers["outputs"][buffer_id] = None
        elif not self._is_elsewhere(chunk + 1):
            handed = [_leaf(tensor.detach()) for tensor in _as_list(outputs)]
            buffers["inputs"][self._buffer(chunk + 1, micro_batch - 1)] = _like(outputs, handed)
        if not trains:
            buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None
            if not self._is_elsewhere(chunk + 1):
                buffers["outputs"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        buffers, chunk = self.pipe_buffers, self.module.chunks[phase]
        if chunk == self._last_chunk:
            self.loss, buffers["losses"][buffer_id] = buffers["losses"][buffer_id], None
        else:
            self.grad_layer = self._output_gradients(chunk, micro_batch - 1)
        with self._running(phase):
            super()._exec_backward_pass(buffer_id)
        buffers["outputs"][buffer_id] = buffers["labels"][buffer_id] = self.grad_layer = None
        if chunk == 0:
            buffers["inputs"][buffer_id] = None

    def _output_gradients(self, chunk: int, micro_batch: int) -> Any:
        """The gradients of a chunk's outputs, as the next chunk has computed them."""
        if self._is_elsewhere(chunk + 1):
            buffer = self._buffer(chunk, micro_batch)
            gradients, self.pipe_buffers["gradients"][buffer] = self.pipe_buffers["gradients"][buffer], None
            return gradients
        buffer = self._buffer(chunk + 1, micro_batch)
        inputs, self.pipe_buffers["inputs"][buffer] = self.pipe_buffers["inputs"][buffer], None
        return _like(inputs, _gradients(inputs))

    def _exec_backward_input_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        assert self._deferred is not None
        with self._deferred.collected() as products:
            self._exec_backward_pass(buffer_id, phase, micro_batch)
        self.pipe_buffers["products"][buffer_id] = products

    def _exec_backward_weight_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        products, self.pipe_buffers["products"][buffer_id] = self.pipe_buffers["products"][buffer_id], None
        # As around the backward pass of a stage that is not the last.
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        self._running_engine_backward = True
        try:
            run_products(products)
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _exec_commit_p2p(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers; ``_exec_recv_activations`` and ``_exec_recv_grads`` wait for those that arrive."""
        self._exchange_shapes([one for one in transfers if one.is_forward and one.boundary not in self._shapes])
        ends = [(one, *self._tensors(one)) for one in transfers]
        works = self._start([(one, tensor) for one, tensors, _ in ends for tensor in tensors])
        for one, tensors, is_tuple in ends:
            own = [works.pop(0) for _ in tensors] if len(works) > 1 else works  # NCCL: one work for all of them
            if one.is_send:
                self._leaving.append((own, tensors))
            else:
                self._arriving[one.is_forward, self._buffer(one.chunk, one.micro_batch)] = _Arriving(
                    own, tensors, is_tuple
                )
        self._wait_for_sends(2 * self.num_stages)

    def _start(self, ends: Sequence[tuple[Transfer, Tensor]]) -> list[dist.Work]:
        """Start to send or receive tensors together."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend if one.is_send else dist.irecv, tensor, self.grid.stage_to_global(one.stage))
                for one, tensor in ends
            ]
        )

    def _tensors(self, one: Transfer) -> tuple[list[Tensor], bool]:
        """What one end of a transfer sends, or receives into, and whether it is a tuple."""
        buffer, buffers = self._buffer(one.chunk, one.micro_batch), self.pipe_buffers
        outputs, inputs = buffers["outputs"][buffer], buffers["inputs"][buffer]
        if one.is_forward:
            if not one.is_send:
                return _allocated(self._shapes[one.boundary], self.device)
            if not torch.is_grad_enabled():
                buffers["outputs"][buffer] = None
            return [tensor.detach().contiguous() for tensor in _as_list(outputs)], isinstance(outputs, tuple)
        if not one.is_send:
            received = [torch.empty_like(tensor) for tensor in _as_list(outputs) if tensor.is_floating_point()]
            return received, isinstance(outputs, tuple)
        buffers["inputs"][buffer] = None
        return _gradients(inputs), isinstance(inputs, tuple)

    def _wait_for_sends(self, most: int) -> None:
        """Wait until at most so many sends are under way; their tensors are kept until then."""
        while len(self._leaving) > most:
            works, _ = self._leaving.popleft()
            for work in works:
                work.wait()

    def _arrived(self, is_forward: bool, buffer_id: int) -> Any:
        works, tensors, is_tuple = self._arriving.pop((is_forward, buffer_id))
        for work in works:
            work.wait()
        return tuple(tensors) if is_tuple else tensors[0]

    def _exec_recv_activations(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        inputs = self._arrived(True, buffer_id)
        self.pipe_buffers["inputs"][buffer_id] = _like(inputs, [_leaf(tensor) for tensor in _as_list(inputs)])

    def _exec_recv_grads(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        self.pipe_buffers["gradients"][buffer_id] = self._arrived(False, buffer_id)

    def _exchange_shapes(self, transfers: Sequence[Transfer]) -> None:
        """Send or receive the types and shapes of the tensors that cross a boundary for the first time."""
        for one in transfers:
            outputs = self.pipe_buffers["outputs"][self._buffer(one.chunk, one.micro_batch)] if one.is_send else None
            self._shapes[one.boundary] = self._shape_row(outputs)
        if transfers:
            for work in self._start([(one, self._shapes[one.boundary]) for one in transfers]):
                work.wait()

    def _shape_row(self, outputs: Any) -> Tensor:
        """What ``_allocated`` reads, int64 [64]; empty for None."""
        row = torch.zeros(64, dtype=torch.int64)
        if outputs is not None:
            numbers = [int(isinstance(outputs, tuple)), len(_as_list(outputs))]
            for tensor in _as_list(outputs):
                numbers += [self.DTYPE_TO_ID[tensor.dtype], tensor.dim(), *tensor.shape]
            row[: len(numbers)] = torch.tensor(numbers)
        return row.to(self.device)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        LoadMicroBatch: _exec_load_micro_batch,
        ForwardPass: _exec_forward_pass,
        BackwardPass: _exec_backward_pass,
        BackwardInputPass: _exec_backward_input_pass,
        BackwardWeightPass: _exec_backward_weight_pass,
        RecvActivation: _exec_recv_activations,
        RecvGrad: _exec_recv_grads,
        CommitP2P: _exec_commit_p2p,
    }


def _allocated(shapes: Tensor, device: torch.device) -> tuple[list[Tensor], bool]:
    """Empty tensors of the types and shapes in a row of ``_shape_row``, and whether they are a tuple."""
    is_tuple, count, *rest = shapes.tolist()
    tensors = []
    for _ in range(count):
        dtype, dims, *rest = rest
        shape, rest = rest[:dims], rest[dims:]
        tensors.append(torch.empty(shape, dtype=PipelineEngine.ID_TO_DTYPE[dtype], device=device))
    return tensors, bool(is_tuple)


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _like(tensors: Any, others: list[Tensor]) -> Any:
    """``others`` in the form of ``tensors``: a tuple, or one tensor."""
    return others[0] if isinstance(tensors, Tensor) else tuple(others)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point())


def _gradients(inputs: Any) -> list[Tensor]:
    """The gradients of those of ``inputs`` that have one."""
    found = []
    for tensor in _as_list(inputs):
        if tensor.is_floating_point():
            assert tensor.grad is not None
            found.append(tensor.grad)
    return found
