"""Parts of DeepSpeed's engines that are replaced: pipeline module, reduction, instructions, checkpoints."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    BufferOpInstruction,
    PipeInstruction,
    ReduceGrads,
    ReduceTiedGrads,
)
from torch import nn

from megatron.parallel.pipeline.schedule import Instruction, InstructionHook


class ExplicitPipelineModule(PipelineModule):
    """PipelineModule with given partition boundaries. A subclass defines ``forward`` over ``self.forward_funcs``.

    DeepSpeed: runtime/pipe/module.py. ``_partition_layers`` accepts neither a list of boundaries nor the operations of
    each layer. ``forward`` decides by class names which layers are recomputed, and silently keeps all activations of
    a group that mixes layers of different classes. ``_exec_reduce_tied_grads`` of the engine, in bf16 with sums in
    fp32, asks a tied weight that is frozen for a gradient: "no attribute '_hp_grad'".
    Tests: tests/parallel/test_partition.py, tests/training/test_activation_checkpointing.py,
    tests/training/test_adapter_training.py. Remove when partition boundaries and a predicate of recomputed layers can
    be passed, and frozen weights are skipped.
    """

    def __init__(self, *, partition_boundaries: Sequence[int], **options: Any):
        self.parts = list(partition_boundaries)
        super().__init__(**options)

    def _partition_layers(self, method: str) -> None:
        assert self.parts[-1] == self._num_layers
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """The tied weights of this stage that are trained, and the group of the stages that share each."""
        return [pair for pair in super().get_tied_weights_and_groups() if pair[0].requires_grad]


def skip_reduction_of_one_rank(engine: DeepSpeedEngine, group_size: int) -> None:
    """Do not reduce gradients in a data-parallel group of one rank.

    DeepSpeed: runtime/engine.py, ``buffered_allreduce_fallback`` copies all gradients into a buffer and back even then.
    Test: tests/engines/test_deepspeed.py. Remove when DeepSpeed returns early for one rank.
    """
    if group_size == 1:
        engine.buffered_allreduce_fallback = lambda grads=None, elements_per_buffer=0: None


_COALESCED_REDUCTIONS = ("_flush_coalesced_reduction_zero12", "_flush_coalesced_reduction_zero3")
_REDUCTIONS = ("allreduce_gradients", *_COALESCED_REDUCTIONS)
"""Methods of the plain engine that reduce gradients."""


@contextmanager
def grad_reduction_coalesced(engine: DeepSpeedEngine) -> Iterator[None]:
    """While inside, the backward passes of a step at ZeRO 2 and 3 add up gradients on this rank. Leaving reduces them.

    The ``engine.step()`` that follows is the one of the last micro-batch. An error inside reduces nothing: the other
    ranks may not be there.

    DeepSpeed: runtime/engine.py, ``coalesce_grad_reduction`` also reduces after an error, and leaves counting the
    micro-batches to ``step``, which must not be called inside.
    Tests: tests/training/test_layouts_agree.py, tests/engines/test_deepspeed.py. Remove when it counts the
    micro-batches and lets errors pass.
    """
    with engine.coalesce_grad_reduction():
        try:
            yield
        except BaseException:
            vars(engine).update(dict.fromkeys(_COALESCED_REDUCTIONS, lambda optimizer: None))
            raise
    engine.micro_steps += engine.gradient_accumulation_steps() - 1


def set_global_batch_size(engine: DeepSpeedEngine, samples: int) -> None:
    """Let the next steps and evaluations of ``engine`` have ``samples`` samples, as it counts them, in micro-batches of
    the same size.

    DeepSpeed: runtime/engine.py, ``set_train_batch_size`` does not restart the count of micro-batches, from which the
    plain engine concludes which one is the last of a step.
    Test: tests/training/test_ramp_up.py. Remove when it does.
    """
    if engine.train_batch_size() != samples:
        engine.set_train_batch_size(samples)
        engine.micro_steps = 0


def reduce_fp32_sums_of_tied_weights(engine: DeepSpeedEngine) -> None:
    """In a pipeline at ZeRO 1: sum a tied weight's gradient over its stages where it is, in ``grad_accum``.

    DeepSpeed: runtime/pipe/engine.py, ``_exec_reduce_tied_grads`` sums ``weight.grad``, which is None if gradients are
    accumulated in fp32 beside it, so that each stage updates its copy of the weight by its own part of the gradient.
    Test: tests/training/test_fp16.py. Remove when it sums what the optimizer reduces.
    """
    if not (isinstance(engine, PipelineEngine) and getattr(engine.optimizer, "use_grad_accum_attribute", False)):
        return

    def reduce_sums(engine: PipelineEngine) -> None:
        for weight, group in engine.module.get_tied_weights_and_groups():
            if weight.grad_accum is not None:
                dist.all_reduce(weight.grad_accum, group=group)

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ReduceTiedGrads: reduce_sums}


def differentiate_outputs_together(engine: DeepSpeedEngine) -> None:
    """In a pipeline: one backward pass for all tensors with gradients that a stage has sent on.

    DeepSpeed: runtime/pipe/engine.py, ``_exec_backward_pass`` runs one for each of them. The layers that several depend
    on would be differentiated as often, and recomputed layers fail, since the first pass frees their inputs.
    Test: tests/training/test_t5_layouts_agree.py. Remove when it calls ``torch.autograd.backward`` once.
    """
    if not isinstance(engine, PipelineEngine):
        return
    run = engine._INSTRUCTION_MAP[BackwardPass]

    def backward(engine: PipelineEngine, buffer_id: int, **options: Any) -> None:
        gradients = engine.grad_layer
        if not engine.is_last_stage():
            join_outputs(engine, buffer_id)
        run(engine, buffer_id=buffer_id, **options)
        engine.grad_layer = gradients

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardPass: backward}


def join_outputs(engine: PipelineEngine, buffer_id: int) -> None:
    """Replace several outputs of a stage, and their gradients, by one tensor each before a backward pass.

    ``ScheduledPipelineEngine`` calls it by itself.
    """
    outputs, gradients = engine.pipe_buffers["outputs"][buffer_id], engine.grad_layer
    sent = [tensor for tensor in outputs if tensor.is_floating_point()] if isinstance(outputs, tuple) else []
    if len(sent) > 1:
        engine.pipe_buffers["outputs"][buffer_id] = torch.cat([tensor.flatten() for tensor in sent])
        engine.grad_layer = torch.cat([gradient.flatten() for gradient in gradients])


def continue_without_reports(engine: DeepSpeedEngine) -> None:
    """Do not end a run because a profile or a file of DeepSpeed's monitors cannot be written: print a warning, once.

    DeepSpeed: runtime/engine.py, ``step`` lets the OSError of a full disk end the run, and
    profiling/flops_profiler/profiler.py leaves stdout redirected to the file.
    Test: tests/engines/test_deepspeed.py. Remove when DeepSpeed handles it.
    """
    for part, name, what in (
        (getattr(engine, "flops_profiler", None), "print_model_profile", "the profile of flops_profiler"),
        (engine.monitor, "write_events", "the files of DeepSpeed's monitors"),
    ):
        if part is not None:
            setattr(part, name, _until_unwritable(getattr(part, name), what))


def _until_unwritable(write: Callable[..., None], what: str) -> Callable[..., None]:
    """``write``, which does nothing any more after an OSError."""
    works = True

    def guarded(*args: Any, **settings: Any) -> None:
        nonlocal works
        screen = sys.stdout
        try:
            if works:
                write(*args, **settings)
        except OSError as error:
            works, sys.stdout = False, screen
            print(f"  warning: {what} cannot be written ({error.strerror}); continuing without", flush=True)

    return guarded


def start_backward_timers_once(engine: DeepSpeedEngine) -> None:
    """With "wall_clock_breakdown" in a pipeline: leave the timers of the backward pass to the pipeline engine.

    DeepSpeed: runtime/pipe/engine.py, ``_exec_backward_pass`` starts them on every stage but the last, and the hook of
    runtime/engine.py on the same tensors starts them again: "bwd_microstep timer has already been started".
    Test: tests/training/test_classic_script.py. Remove when only one of the two starts them.
    """
    if isinstance(engine, PipelineEngine) and not engine.is_last_stage():
        engine.engine_timers.backward_timers = []
        engine.engine_timers.backward_inner_timers = []


@contextmanager
def instruction_hooks(engine: DeepSpeedEngine, hooks: Sequence[InstructionHook]) -> Iterator[None]:
    """While inside, call ``hooks`` for each instruction that DeepSpeed runs by itself: those of the pipeline engine, or
    the reduction of the plain engine.

    DeepSpeed: runtime/pipe/engine.py, ``_INSTRUCTION_MAP`` is the only place through which all instructions pass.
    Test: tests/tools/reporting/test_trace.py. Remove when engines have callbacks.
    """
    if not hooks:
        yield
        return
    if isinstance(engine, PipelineEngine):
        instructions = engine._INSTRUCTION_MAP.items()
        replacement = {"_INSTRUCTION_MAP": {kind: _with_hooks(kind, run, hooks) for kind, run in instructions}}
    else:
        replacement = {
            name: _with_hooks(ReduceGrads, getattr(type(engine), name), hooks).__get__(engine) for name in _REDUCTIONS
        }
    with replaced(engine, **replacement):
        yield


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """While inside, ``owner`` has these attributes in place of its own, or of its class's."""
    originals = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - originals:
            del vars(owner)[name]
        vars(owner).update(originals)


def _with_hooks(kind: type[PipeInstruction], execute: Callable, hooks: Sequence[InstructionHook]) -> Callable:
    counts: Counter[int | None] = Counter()

    def execute_with_hooks(engine: DeepSpeedEngine, *optimizer: Any, **arguments: Any) -> None:
        phase = arguments.get("phase")
        counts[phase] += 1
        number = arguments.get("micro_batch", counts[phase] if issubclass(kind, BufferOpInstruction) else None)
        with inside_hooks(hooks, Instruction(kind.__name__, number, phase)):
            execute(engine, *optimizer, **arguments)

    return execute_with_hooks


@contextmanager
def inside_hooks(hooks: Sequence[InstructionHook], instruction: Instruction) -> Iterator[None]:
    """Enter the contexts of all ``hooks`` for ``instruction``."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook(instruction))
        yield


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
"""Functions of torch.distributed that ``collectives_timed`` observes."""
_KEPT = {"all_gather_function": "all_gather_into_tensor", "reduce_scatter_function": "reduce_scatter_tensor"}
"""Those of which DeepSpeed's backend has a reference, by the name of its attribute."""


@contextmanager
def collectives_timed(now: Callable[[], float], record: Callable[[str, float, float], None]) -> Iterator[None]:
    """While inside, call ``record(name, begin, end)`` for each collective called as ``torch.distributed.NAME``.

    torch 2.13: torch.distributed has no hook for collectives on every backend, so the functions are replaced; those
    that DeepSpeed has kept, in comm/torch.py, as well.
    Test: tests/tools/reporting/test_trace.py. Remove when gloo and nccl both have such a hook.
    """

    def timed(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = now()
            result = function(*arguments, **options)
            record(name, begin, now())
            return result

        return call

    backend = comm.comm.cdb
    kept = {name: timed(function, getattr(backend, name)) for name, function in _KEPT.items() if hasattr(backend, name)}
    collectives = {name: timed(name, getattr(dist, name)) for name in COLLECTIVES}
    with replaced(dist, **collectives), nullcontext() if backend is None else replaced(backend, **kept):
        yield


def use_checkpoint_engine(engine: DeepSpeedEngine, checkpoint_engine: CheckpointEngine) -> None:
    """Write and read the engine's files through ``checkpoint_engine``, and copy no script beside them.

    DeepSpeed: runtime/engine.py. A checkpoint engine can be chosen from DeepSpeed's own only. ``_copy_recovery_script``
    writes a script that unpickles checkpoints into the folder, through any link that lies there.
    Tests: tests/checkpoint/test_saving.py, test_checkpoint_files.py. Remove when the config accepts a class.
    """
    engine.checkpoint_engine = checkpoint_engine
    engine._copy_recovery_script = lambda save_path: None
