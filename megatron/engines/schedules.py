"""DeepSpeed's pipeline engine with further schedules: interleaved 1F1B and zero bubble.

A subclass of DeepSpeed's engine with its own instructions, as DeepSpeed's DualPipeV engine is one, and not
torch.distributed.pipelining under DeepSpeed's optimizer: the subclass keeps DeepSpeed's loss scale, ZeRO, bf16 sums in
fp32, tied weights, evaluation and checkpoints as they are, and replaces only which tensors go where and when. torch's
stages would need a second path for each of these, and divide a backward pass by walking through its graph, which fails
for recomputed layers; here linear layers defer the gradients of their weights (``megatron.parallel.tensor.deferred``).

DeepSpeed 0.19.8: runtime/pipe/engine.py knows one model chunk per stage and one schedule, dualpipev.py two chunks and
one schedule; ``deepspeed.initialize`` chooses between the two engines by the class of the module.
Test: tests/training/test_schedules_agree.py. Remove when DeepSpeed has these schedules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
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

from megatron.engines.overrides import overrides
from megatron.engines.pipeline_engine import PipelinedEngine
from megatron.engines.transfers import Transfers, as_list
from megatron.parallel.pipeline.program import Step, Transfer, program
from megatron.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    Schedule,
)
from megatron.parallel.tensor.deferred import DeferredWeightGradients, compute_weight_gradients


class BackwardInputPass(BufferOpInstruction):
    """The part of a backward pass that computes the gradients of a chunk's inputs."""


class BackwardWeightPass(BufferOpInstruction):
    """The rest of it: the gradients of the weights of linear layers."""


class _Instructions(NamedTuple):
    """A schedule as DeepSpeed's engine reads it."""

    steps: list[list[PipeInstruction]]
    buffers: int

    def num_pipe_buffers(self) -> int:
        return self.buffers

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.steps)


class ScheduledEngine(PipelinedEngine):
    """Runs the schedule of a ``ChunkedModel``.

    A buffer belongs to a micro-batch in a chunk: number of the chunk in the stage x micro-batches + micro-batch.
    """

    _chunk: int | None = None
    """The model chunk that runs now."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        assert not (self.is_pipe_partitioned or self.is_grad_partitioned or self.dynamic_shape)
        assert not (self.has_attention_mask or self.has_bool_tensors)
        self._transfers = Transfers(self.grid.stage_to_global, self.device, most_sends=2 * self.num_stages)
        self._deferred = DeferredWeightGradients(self.module) if self._splits_backward else None
        self.pipe_buffers.update(losses=[], gradients=[], weight_gradients=[])

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

    @overrides(PipelineEngine, "(self)")
    def is_last_stage(self) -> bool:
        """Whether the chunk that runs is the last; outside of passes, whether this stage holds it."""
        if not self.is_ready:  # DeepSpeed's constructor asks for the place of the stage
            return super().is_last_stage()
        return self._last_chunk in self.module.chunks if self._chunk is None else self._chunk == self._last_chunk

    @overrides(PipelineEngine, "(self)")
    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.module.schedule.stage_of(self._last_chunk))

    @overrides(PipelineEngine, "(self)")
    def reset_activation_shape(self) -> None:
        """Exchange the shapes of tensors between chunks again."""
        super().reset_activation_shape()
        self._transfers.forget_shapes()

    @overrides(PipelineEngine, "(self)")
    def _train_schedule(self) -> _Instructions:
        instructions = self._instructions(program(self._schedule, self.stage_id))
        instructions.steps.append([ReduceTiedGrads(), ReduceGrads(), OptimizerStep()])
        return instructions

    @overrides(PipelineEngine, "(self, micro_batches)")
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
        arguments = {"buffer_id": self._buffer(chunk, number), "phase": phase, "micro_batch": number + 1}
        if kind == FORWARD:
            before = [RecvActivation(**arguments)] if self._is_elsewhere(chunk - 1) else []
            # The stage that holds both ends of the model reads each micro-batch once.
            if chunk == 0 or (chunk == self._last_chunk and 0 not in self.module.chunks):
                before.append(LoadMicroBatch(**{**arguments, "phase": None}))
            return [*before, ForwardPass(**arguments)]
        if kind == WEIGHT_GRADIENTS:
            return [BackwardWeightPass(**arguments)]
        before = [RecvGrad(**arguments)] if self._is_elsewhere(chunk + 1) else []
        return [*before, {BACKWARD: BackwardPass, INPUT_GRADIENTS: BackwardInputPass}[kind](**arguments)]

    def _buffer(self, chunk: int, micro_batch: int) -> int:
        return self.module.chunks.index(chunk) * self.micro_batches + micro_batch

    def _is_elsewhere(self, chunk: int) -> bool:
        """Whether there is such a chunk, on another stage."""
        return 0 <= chunk <= self._last_chunk and chunk not in self.module.chunks

    def _exec_schedule(self, pipe_schedule: _Instructions) -> None:
        super()._exec_schedule(pipe_schedule)
        self._transfers.finish()

    @contextmanager
    def _running(self, phase: int) -> Iterator[int]:
        """While inside, the module and the engine are those of one chunk: its number in the model."""
        self._chunk = self.module.chunks[phase]
        self.module.expose(phase)
        try:
            yield self._chunk
        finally:
            self._chunk = None

    @overrides(PipelineEngine, "(self, buffer_id)")
    def _exec_load_micro_batch(self, buffer_id: int, micro_batch: int, phase: None) -> None:
        super()._exec_load_micro_batch(buffer_id)
        if self.is_last_stage():
            labels, buffer = self.pipe_buffers["labels"], self._buffer(self._last_chunk, micro_batch - 1)
            loaded, labels[buffer_id] = labels[buffer_id], None
            labels[buffer] = loaded

    @overrides(PipelineEngine, "(self, buffer_id)")
    def _exec_forward_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        buffers = self.pipe_buffers
        with self._running(phase) as chunk:
            super()._exec_forward_pass(buffer_id)
        outputs, trains = buffers["outputs"][buffer_id], torch.is_grad_enabled()
        if chunk == self._last_chunk:
            buffers["losses"][buffer_id] = self.loss if trains else None
            buffers["outputs"][buffer_id] = None
        elif not self._is_elsewhere(chunk + 1):
            buffers["inputs"][self._buffer(chunk + 1, micro_batch - 1)] = _leaves(outputs)
        if not trains:
            buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None
            if not self._is_elsewhere(chunk + 1):
                buffers["outputs"][buffer_id] = None

    def _exec_backward_pass(  # type: ignore[override]
        self, buffer_id: int, phase: int, micro_batch: int
    ) -> None:
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
        return _gradients(inputs)

    def _exec_backward_input_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        assert self._deferred is not None
        with self._deferred.collected() as weight_gradients:
            self._exec_backward_pass(buffer_id, phase, micro_batch)
        self.pipe_buffers["weight_gradients"][buffer_id] = weight_gradients

    def _exec_backward_weight_pass(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        buffers = self.pipe_buffers["weight_gradients"]
        weight_gradients, buffers[buffer_id] = buffers[buffer_id], None
        # As around the backward pass of a stage that is not the last.
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        self._running_engine_backward = True
        try:
            compute_weight_gradients(weight_gradients)
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _exec_commit_p2p(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers; ``_exec_recv_activations`` and ``_exec_recv_grads`` wait for those that arrive."""
        self._transfers.start(transfers, self._sent)

    def _sent(self, one: Transfer) -> Any:
        """The outputs or gradients that a transfer sends. What is not needed any more is not kept."""
        buffer = self._buffer(one.chunk, one.micro_batch)
        inputs, outputs = self.pipe_buffers["inputs"], self.pipe_buffers["outputs"]
        if not one.is_forward:
            value, inputs[buffer] = _gradients(inputs[buffer]), None
            return value
        value = outputs[buffer]
        if not torch.is_grad_enabled():
            outputs[buffer] = None
        if isinstance(value, Tensor):
            return value.detach().contiguous()
        return tuple(tensor.detach().contiguous() for tensor in value)

    @overrides(PipelineEngine, "(self, buffer_id)")
    def _exec_recv_activations(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        inputs = self._transfers.take(True, self.module.chunks[phase], micro_batch - 1)
        self.pipe_buffers["inputs"][buffer_id] = _leaves(inputs)

    @overrides(PipelineEngine, "(self, buffer_id)")
    def _exec_recv_grads(self, buffer_id: int, phase: int, micro_batch: int) -> None:
        self.pipe_buffers["gradients"][buffer_id] = self._transfers.take(
            False, self.module.chunks[phase], micro_batch - 1
        )

    _INSTRUCTION_MAP = {
        **PipelinedEngine._INSTRUCTION_MAP,
        LoadMicroBatch: _exec_load_micro_batch,
        ForwardPass: _exec_forward_pass,
        BackwardPass: _exec_backward_pass,
        BackwardInputPass: _exec_backward_input_pass,
        BackwardWeightPass: _exec_backward_weight_pass,
        RecvActivation: _exec_recv_activations,
        RecvGrad: _exec_recv_grads,
        CommitP2P: _exec_commit_p2p,
    }


def _leaves(outputs: Any) -> Any:
    """Outputs of a chunk as inputs of the next one, whose gradients are wanted."""
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in as_list(outputs)]
    return leaves[0] if isinstance(outputs, Tensor) else tuple(leaves)


def _gradients(inputs: Any) -> Any:
    """The gradient of an input, or those of the inputs that have one."""
    found = []
    for tensor in as_list(inputs):
        if tensor.is_floating_point():
            assert tensor.grad is not None
            found.append(tensor.grad)
    return found[0] if isinstance(inputs, Tensor) else tuple(found)
