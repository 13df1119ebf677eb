"""``PipelinedEngine``: DeepSpeed's pipeline engine with the schedules of ``megatron.parallel.pipeline``.

It runs the program of ``megatron.parallel.pipeline.program``. Why not torch.distributed.pipelining with DeepSpeed's
optimizer: a subclass keeps DeepSpeed's loss scale, ZeRO, fp32 accumulation in bf16, tied weights, evaluation and
checkpoints, and replaces only when which tensors are sent where. torch's stages would need a second implementation of
each, and they split a backward pass by walking its graph, which fails for recomputed layers; here linear layers defer
weight gradients (``megatron.parallel.tensor.deferred``).

DeepSpeed 0.19.8: runtime/pipe/engine.py supports only 1F1B with one model chunk per stage, and blocks while it sends.
Its dualpipev.py, with two chunks, waits for all transfers that were started together, so that stages idle although
they do not need them yet.
Test: tests/training/test_schedules_agree.py, test_transfers.py.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.engine import Engine
from megatron.engines.overrides import overrides
from megatron.engines.transfers import ChunkOutput, Transfers, as_inputs, as_list, gradients_of
from megatron.engines.zero import ZeroOptimizer
from megatron.model.embedding import limits_on_host
from megatron.ops.packed_attention import keep_on_host
from megatron.parallel.pipeline.program import Step, Transfer, program
from megatron.parallel.pipeline.schedule import (
    FORWARD,
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    Instruction,
    Schedule,
)
from megatron.parallel.pipeline.simulation import in_flight
from megatron.parallel.tensor.deferred import Collected, DeferredWeightGradients, compute_weight_gradients


class PipelinedEngine(Engine, PipelineEngine):
    """Pipeline engine that runs the schedule of a ``PipelinedModel``: passes, and transfers between them.

    There is a buffer per chunk and micro-batch: index of the chunk on the stage x micro-batches + micro-batch.
    """

    grad_layer: Any
    _is_ready = False
    """Whether the constructor has finished."""
    _chunk: int | None = None
    """The model chunk that is running."""

    def __init__(self, *arguments: Any, run: RunConfig, **options: Any):
        super().__init__(*arguments, run=run, **options)
        self._limits_on_host = partial(limits_on_host, run.model)
        self._is_ready = True
        assert not (self.is_pipe_partitioned or self.is_grad_partitioned or self.dynamic_shape)
        assert not (self.has_attention_mask or self.has_bool_tensors)
        if not self.is_last_stage():
            # With "wall_clock_breakdown" DeepSpeed starts the timers of a backward pass twice on these stages: here,
            # and in a hook of runtime/engine.py. Test: tests/training/test_classic_script.py.
            self.engine_timers.backward_timers = []
            self.engine_timers.backward_inner_timers = []
        self._transfers = Transfers(self.layout, self.device)
        kinds = {action.kind for action in self._schedule.actions(self.stage_id)}
        self._deferred = DeferredWeightGradients(self.module) if WEIGHT_GRADIENTS in kinds else None
        self._losses: dict[int, Tensor] = {}
        self._limits: dict[int, Tensor | None] = {}
        self._weight_gradients: dict[int, Collected] = {}

    @property
    def mean_loss_parts(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Terms of the loss of the last global batch by name, [] each, averaged like the loss."""
        return self.get_additional_losses() or {}

    @overrides(PipelineEngine, "(self)")
    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of tied weights over their stages, in the buckets at ZeRO 1.

        DeepSpeed sums ``weight.grad``, which is None if gradients are accumulated in fp32 in another tensor: each stage
        would update its copy of the weight with its own part of the gradient. Test: tests/training/test_fp16.py.
        """
        if not isinstance(self.optimizer, ZeroOptimizer):
            super()._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            if weight.requires_grad:
                dist.all_reduce(self.optimizer.gradient_of(weight), group=group)

    @property
    def _schedule(self) -> Schedule:
        return replace(self.module.schedule, micro_batches=self.micro_batches)

    @property
    def _last_chunk(self) -> int:
        schedule = self.module.schedule
        return schedule.stages * schedule.chunks - 1

    @overrides(PipelineEngine, "(self)")
    def is_last_stage(self) -> bool:
        """Whether the running chunk is the last chunk; outside of passes, whether this stage holds it."""
        if not self._is_ready:  # in DeepSpeed's constructor it means the last stage of the grid
            return super().is_last_stage()
        return self._last_chunk in self.module.chunks if self._chunk is None else self._chunk == self._last_chunk

    @overrides(PipelineEngine, "(self)")
    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.module.schedule.stage_of(self._last_chunk))

    @overrides(PipelineEngine, "(self)")
    def _aggregate_total_loss(self) -> Tensor:
        """The loss of a batch, []. Other stages receive it into a device tensor; a host tensor would synchronize."""
        if self.is_last_stage():
            return super()._aggregate_total_loss()
        parts = self.module.get_additional_losses()
        losses = torch.zeros(2 + len(parts or ()), device=self.device)
        dist.broadcast(losses, self._loss_stage_global_rank(), group=self.grid.get_pipe_parallel_group())
        self.dp_group_loss = losses[0]
        if parts is not None:
            self.agg_additional_losses = dict(zip(parts, losses[2:].unbind(), strict=True))
        return losses[1]

    @overrides(PipelineEngine, "(self, iterator)")
    def set_dataiterator(self, iterator: Iterator[Batch] | None) -> None:
        """Use the micro-batches of ``iterator``; DeepSpeed ignores them between the first and the last stage."""
        self.data_iterator = iterator

    @overrides(PipelineEngine, "(self)")
    def reset_activation_shape(self) -> None:
        """Make stages exchange the shapes of tensors again."""
        super().reset_activation_shape()
        self._transfers.forget_shapes()

    @overrides(PipelineEngine, "(self)")
    def _train_schedule(self) -> tuple[Step, ...]:
        return self._program()

    @overrides(PipelineEngine, "(self, micro_batches)")
    def _inference_schedule(self, micro_batches: int) -> tuple[Step, ...]:
        assert micro_batches == self.micro_batches
        return self._program(forward_only=True)

    def _program(self, *, forward_only: bool = False) -> tuple[Step, ...]:
        """The steps of a batch; without early receives if shapes are not known yet, which stages have to wait for."""
        steps = program(self._schedule, self.stage_id, forward_only)
        if all(self._transfers.knows_shape(step) for step in steps if isinstance(step, Transfer)):
            return steps
        return program(self._schedule, self.stage_id, forward_only, receives_early=False)

    @overrides(PipelineEngine, "(self, pipe_schedule)")
    def _exec_schedule(self, pipe_schedule: tuple[Step, ...]) -> None:
        """Run the steps of a batch with ``hooks``, and update the weights unless it is an evaluation."""
        self._reserve_pipe_buffers(len(self.module.chunks) * self.micro_batches)
        self.fwd_outputs: list[Tensor] = []
        self._limits.clear()
        self._transfers.most_sends = 2 * sum(in_flight(self._schedule, self.stage_id))
        for step in pipe_schedule:
            if isinstance(step, Transfer):
                self._start(step)
            elif step.kind == FORWARD:
                self._forward(step)
            elif step.kind == WEIGHT_GRADIENTS:
                self._compute_weight_gradients(step)
            else:
                self._backward(step)
        if torch.is_grad_enabled():
            for name, execute in (
                ("ReduceTiedGrads", self._exec_reduce_tied_grads),
                ("ReduceGrads", self._exec_reduce_grads),
                ("OptimizerStep", self._exec_optimizer_step),
            ):
                with self.inside_hooks(Instruction(name)):
                    execute()
        self._transfers.finish()

    def _start(self, transfer: Transfer) -> None:
        if not transfer.is_send:
            self._transfers.receive(transfer)
            return
        with self._instruction("SendActivation" if transfer.is_forward else "SendGrad", transfer):
            self._transfers.send(transfer, self._sent(transfer))

    def _received(self, action: Action) -> Any:
        """The input of a pass from another stage; waits for it."""
        is_forward = action.kind == FORWARD
        source = self._schedule.stage_of(action.chunk + (-1 if is_forward else 1))
        with self._instruction("RecvActivation" if is_forward else "RecvGrad", action):
            return self._transfers.take(Transfer(False, is_forward, action.chunk, action.micro_batch, source))

    def _instruction(self, name: str, step: Step) -> AbstractContextManager:
        chunks = self.module.chunks
        phase = chunks.index(step.chunk) if len(chunks) > 1 else None
        return self.inside_hooks(Instruction(name, step.micro_batch + 1, phase))

    def _buffer(self, chunk: int, micro_batch: int) -> int:
        return self.module.chunks.index(chunk) * self.micro_batches + micro_batch

    def _is_elsewhere(self, chunk: int) -> bool:
        """Whether the chunk exists and is on another stage."""
        return 0 <= chunk <= self._last_chunk and chunk not in self.module.chunks

    @contextmanager
    def _running(self, chunk: int) -> Iterator[None]:
        """A context in which module and engine run ``chunk``."""
        self._chunk = chunk
        self.module.expose(self.module.chunks.index(chunk))
        try:
            yield
        finally:
            self._chunk = None

    def _load(self, micro_batch: int, batches: Iterator[Batch]) -> None:
        """Load a micro-batch: its inputs to the buffer of the first chunk, its labels to the one of the last chunk.

        What limits attention in it stays on the host: segment ids that arrive from other stages would have to be copied
        there, and the host would wait for them. DeepSpeed copies the inputs twice, and the copies lose what is kept.
        """
        with self.inside_hooks(Instruction("LoadMicroBatch", micro_batch + 1)):
            batch = next(batches)
            self._limits[micro_batch] = self._limits_on_host(as_list(batch.tokens)[-1])
            is_first, is_last = 0 in self.module.chunks, self.is_last_stage()
            batch = self.moved(batch) if is_first or is_last else batch
        if is_first:
            self.pipe_buffers["inputs"][self._buffer(0, micro_batch)] = as_inputs(batch.tokens)
        if is_last:
            self.pipe_buffers["labels"][self._buffer(self._last_chunk, micro_batch)] = batch.targets

    def _forward(self, action: Action) -> None:
        chunk, _, number = action
        buffers, buffer, trains = self.pipe_buffers, self._buffer(chunk, number), torch.is_grad_enabled()
        received = self._received(action) if self._is_elsewhere(chunk - 1) else None
        if chunk == self.module.chunks[0] and self.data_iterator is not None:
            self._load(number, self.data_iterator)
        if received is not None:
            limits = self._limits.get(number)
            if limits is not None and received[1].shape == limits.shape:  # an encoder of images sends [b, 2, s]
                keep_on_host(received[1], limits)
            buffers["inputs"][buffer] = as_inputs(received)
        with self._instruction("ForwardPass", action), self._running(chunk):
            self._exec_forward_pass(buffer)
        if chunk == self._last_chunk:
            if trains:
                self._losses[buffer] = self.loss
            buffers["outputs"][buffer] = None
        elif not self._is_elsewhere(chunk + 1):
            outputs = buffers["outputs"][buffer]
            buffers["inputs"][self._buffer(chunk + 1, number)] = as_inputs(outputs)
            buffers["outputs"][buffer] = ChunkOutput(outputs) if trains else None
        if not trains:
            buffers["inputs"][buffer] = buffers["labels"][buffer] = None

    def _backward(self, action: Action) -> None:
        """Run a full backward pass, or its input-gradient part."""
        chunk, kind, number = action
        buffers, buffer = self.pipe_buffers, self._buffer(chunk, number)
        if chunk == self._last_chunk:
            self.loss = self._losses.pop(buffer)
        else:
            self.grad_layer = self._output_gradients(action)
        name = "BackwardPass"
        collected: AbstractContextManager[Collected | None] = nullcontext()
        if kind == INPUT_GRADIENTS:
            assert self._deferred is not None
            name, collected = "BackwardInputPass", self._deferred.collected()
        with self._instruction(name, action), self._running(chunk), collected as weight_gradients:
            self._exec_backward_pass(buffer)
        if weight_gradients is not None:
            self._weight_gradients[buffer] = weight_gradients
        buffers["outputs"][buffer] = buffers["labels"][buffer] = self.grad_layer = None
        if chunk == 0:
            buffers["inputs"][buffer] = None

    def _output_gradients(self, action: Action) -> Any:
        """The gradients of a chunk's outputs, from the next chunk."""
        chunk, _, number = action
        if self._is_elsewhere(chunk + 1):
            return self._received(action)
        inputs, buffer = self.pipe_buffers["inputs"], self._buffer(chunk + 1, number)
        computed, inputs[buffer] = gradients_of(inputs[buffer]), None
        return computed

    def _compute_weight_gradients(self, action: Action) -> None:
        """Run the weight-gradient part of a split backward pass."""
        buffer = self._buffer(action.chunk, action.micro_batch)
        with self._instruction("BackwardWeightPass", action):
            self._running_engine_backward = True
            try:
                compute_weight_gradients(self._weight_gradients.pop(buffer))
            finally:
                self._running_engine_backward = False

    def _sent(self, transfer: Transfer) -> Any:
        """The outputs or gradients to send; frees what is not needed any more."""
        buffer = self._buffer(transfer.chunk, transfer.micro_batch)
        inputs, outputs = self.pipe_buffers["inputs"], self.pipe_buffers["outputs"]
        if not transfer.is_forward:
            value, inputs[buffer] = gradients_of(inputs[buffer]), None
            return value
        value = outputs[buffer]
        outputs[buffer] = ChunkOutput(value) if torch.is_grad_enabled() else None
        if isinstance(value, Tensor):
            return value.detach().contiguous()
        return tuple(tensor.detach().contiguous() for tensor in value)
