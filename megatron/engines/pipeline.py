"""DeepSpeed's pipeline engine as this suite corrects it, and its containers: a model divided into stages or chunks.

DeepSpeed 0.19.8: runtime/pipe/module.py. ``_partition_layers`` accepts neither a list of boundaries nor the operations
of each layer, and knows one run of layers for each stage. ``forward`` decides by class names which layers are
recomputed, and silently keeps all activations of a group that mixes layers of different classes.
``_exec_reduce_tied_grads`` of the engine, in bf16 with sums in fp32, asks a tied weight that is frozen for a gradient:
"no attribute '_hp_grad'".
Tests: tests/parallel/test_partition.py, tests/training/test_activation_checkpointing.py, test_adapter_training.py,
test_schedules_agree.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, BufferOpInstruction, PipeInstruction, ReduceTiedGrads
from torch import Tensor, nn

from megatron.config import ActivationConfig
from megatron.engines.containers import Layers, loss_parts, run_layers
from megatron.engines.engine import Engine
from megatron.engines.overrides import expect, overrides, replaced
from megatron.model.loss import LossFn
from megatron.model.t5 import without_bias
from megatron.model.transformer import HiddenStates
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, Schedule

expect(PipelineModule, "_set_bounds", "(self, start=None, stop=None)")


class PipelinedModel(PipelineModule):
    """A model divided into pipeline stages at ``partition_boundaries`` of its list of layers; ZeRO 0 or 1."""

    def __init__(
        self,
        layers: Layers,
        loss_fn: LossFn,
        activation: ActivationConfig,
        layout: ParallelLayout,
        *,
        partition_boundaries: Sequence[int],
    ):
        self.layers_per_checkpoint = activation.layers_together
        self.parts = list(partition_boundaries)
        super().__init__(layers=layers, loss_fn=loss_fn, topology=layout.pipeline_topology)

    @overrides(PipelineModule, "(self, method='uniform')")
    def _partition_layers(self, method: str = "uniform") -> None:
        assert self.parts[-1] == self._num_layers
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    @overrides(PipelineModule, "(self, forward_input)")
    def forward(self, forward_input: HiddenStates) -> Any:
        """This stage's part of the model."""
        outputs = run_layers(self.forward_funcs, forward_input, self.layers_per_checkpoint if self.training else 0)
        return outputs if isinstance(outputs, Tensor) else without_bias(outputs)

    @overrides(PipelineModule, "(self)")
    def get_additional_losses(self) -> dict[str, Tensor] | None:
        """The terms of the last loss, which DeepSpeed averages and broadcasts together with the loss."""
        return loss_parts(self) or None

    @overrides(PipelineModule, "(self)")
    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """The tied weights of this stage that are trained, and the group of the stages that share each."""
        return [pair for pair in super().get_tied_weights_and_groups() if pair[0].requires_grad]


class ChunkedModel(PipelinedModel):
    """The same with the model chunks per stage of another schedule, as the interleaved one; one is exposed at a time.

    The number of micro-batches of ``schedule`` does not matter here.
    """

    def __init__(self, *arguments: Any, schedule: Schedule, partition_boundaries: Sequence[int]):
        self.schedule = schedule
        super().__init__(*arguments, partition_boundaries=partition_boundaries)

    def _partition_layers(self, method: str = "uniform") -> None:
        assert self.parts[-1] == self._num_layers and len(self.parts) - 1 == self.num_stages * self.schedule.chunks
        self.chunks = self.schedule.chunks_of(self.stage_id)

    @overrides(PipelineModule, "(self, layer_idx)")
    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer, by its number in the model."""
        chunk = next(number for number, end in enumerate(self.parts[1:]) if layer_idx < end)
        return self.schedule.stage_of(chunk)

    @overrides(PipelineModule, "(self)")
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

    @overrides(PipelineModule, "(self, save_dir, checkpoint_engine, exclude_frozen_params=False)")
    def save_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Write the layers of all chunks."""
        for number in range(len(self.chunks)):
            self.expose(number)
            super().save_state_dict(*arguments, **options)
        self.expose(0)

    @overrides(PipelineModule, "(self, load_dir, checkpoint_engine, strict=True)")
    def load_state_dir(self, *arguments: Any, **options: Any) -> None:
        """Read the layers of all chunks."""
        for number in range(len(self.chunks)):
            self.expose(number)
            super().load_state_dir(*arguments, **options)
        self.expose(0)


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
        """At ZeRO 1: sum a tied weight's gradient over its stages in the bucket where it is.

        DeepSpeed sums ``weight.grad``, which is None if gradients are accumulated in another tensor in fp32. Each stage
        then updates its copy of the weight with its own part of the gradient. Test: tests/training/test_fp16.py.
        """
        gradients = getattr(self.optimizer, "gradients", None)
        if gradients is None:
            super()._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            dist.all_reduce(gradients.of(weight), group=group)

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


def _with_hooks(kind: type[PipeInstruction], execute: Callable) -> Callable:
    counts: Counter[int | None] = Counter()

    def execute_with_hooks(engine: PipelinedEngine, **arguments: Any) -> None:
        phase = arguments.get("phase")
        counts[phase] += 1
        number = arguments.get("micro_batch", counts[phase] if issubclass(kind, BufferOpInstruction) else None)
        with engine.inside_hooks(Instruction(kind.__name__, number, phase)):
            execute(engine, **arguments)

    return execute_with_hooks
