"""DeepSpeed's pipeline engines as this suite corrects them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, BufferOpInstruction, PipeInstruction, ReduceTiedGrads
from torch import Tensor

from megatron.engines.engine import Engine
from megatron.engines.overrides import overrides, replaced
from megatron.parallel.pipeline.schedule import Instruction


class PipelinedEngine(Engine, PipelineEngine):
    """DeepSpeed's pipeline engine, with 1F1B."""

    grad_layer: Any
    is_ready = False
    """Whether the constructor has ended."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.is_ready = True
        self.using_bf16_optimizer = isinstance(self.optimizer, BF16_Optimizer)  # DeepSpeed asks for exactly that class
        if not self.is_last_stage():
            # With "wall_clock_breakdown" DeepSpeed starts the timers of a backward pass twice on these stages: here,
            # and in a hook of runtime/engine.py. Test: tests/training/test_classic_script.py.
            self.engine_timers.backward_timers = []
            self.engine_timers.backward_inner_timers = []

    @property
    def mean_loss_parts(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The terms of the loss of the last global batch by name, [], averaged like the loss."""
        return self.get_additional_losses() or {}

    @overrides(PipelineEngine, "(self)")
    def _exec_reduce_tied_grads(self) -> None:
        """At ZeRO 1: sum a tied weight's gradient over its stages where it is, in ``grad_accum``.

        DeepSpeed sums ``weight.grad``, which is None if gradients are accumulated in another tensor in fp32. Each stage
        then updates its copy of the weight with its own part of the gradient. Test: tests/training/test_fp16.py.
        """
        if not getattr(self.optimizer, "use_grad_accum_attribute", False):
            super()._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            if weight.grad_accum is not None:
                dist.all_reduce(weight.grad_accum, group=group)

    @overrides(PipelineEngine, "(self, buffer_id)")
    def _exec_backward_pass(self, buffer_id: int) -> None:
        """One backward pass for all tensors with gradients that a stage has sent on.

        DeepSpeed runs one for each of them. The layers that several depend on would be differentiated as often, and
        recomputed layers fail, since the first pass frees their inputs. Test: tests/training/test_t5_layouts_agree.py.
        """
        outputs, gradients = self.pipe_buffers["outputs"][buffer_id], self.grad_layer
        sent = [tensor for tensor in outputs if tensor.is_floating_point()] if isinstance(outputs, tuple) else []
        if len(sent) > 1 and not self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = torch.cat([tensor.flatten() for tensor in sent])
            self.grad_layer = torch.cat([gradient.flatten() for gradient in gradients])
        super()._exec_backward_pass(buffer_id)
        self.grad_layer = gradients

    @overrides(PipelineEngine, "(self, pipe_schedule)")
    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Run the instructions of a schedule, inside ``hooks``."""
        if not self.hooks:
            super()._exec_schedule(pipe_schedule)
            return
        instructions = {kind: _with_hooks(kind, run) for kind, run in self._INSTRUCTION_MAP.items()}
        with replaced(self, _INSTRUCTION_MAP=instructions):
            super()._exec_schedule(pipe_schedule)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        ReduceTiedGrads: _exec_reduce_tied_grads,
        BackwardPass: _exec_backward_pass,
    }


class BidirectionalEngine(PipelinedEngine, DualPipeVEngine):
    """DeepSpeed's pipeline engine with DualPipeV."""

    _INSTRUCTION_MAP = {
        **DualPipeVEngine._INSTRUCTION_MAP,
        ReduceTiedGrads: PipelinedEngine._exec_reduce_tied_grads,
    }


def _with_hooks(kind: type[PipeInstruction], execute: Callable) -> Callable:
    counts: Counter[int | None] = Counter()

    def execute_with_hooks(engine: PipelinedEngine, **arguments: Any) -> None:
        phase = arguments.get("phase")
        counts[phase] += 1
        number = arguments.get("micro_batch", counts[phase] if issubclass(kind, BufferOpInstruction) else None)
        with engine.inside_hooks(Instruction(kind.__name__, number, phase)):
            execute(engine, **arguments)

    return execute_with_hooks
