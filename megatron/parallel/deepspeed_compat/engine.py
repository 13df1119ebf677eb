"""Parts of DeepSpeed's engines that are replaced: pipeline module, gradient norm, step, instructions, checkpoints."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BufferOpInstruction, PipeInstruction, ReduceGrads
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn

from megatron.config.errors import NumericsError
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook


class ExplicitPipelineModule(PipelineModule):
    """PipelineModule with given partition boundaries. A subclass defines ``forward`` over ``self.forward_funcs``.

    DeepSpeed: runtime/pipe/module.py. ``_partition_layers`` accepts neither a list of boundaries nor the operations of
    each layer. ``forward`` decides by class names which layers are recomputed, and silently keeps all activations of
    a group that mixes layers of different classes.
    Tests: tests/parallel/test_partition.py, tests/training/test_activation_checkpointing.py. Remove when partition
    boundaries and a predicate of recomputed layers can be passed.
    """

    def __init__(self, *, partition_boundaries: Sequence[int], **options: Any):
        self.parts = list(partition_boundaries)
        super().__init__(**options)

    def _partition_layers(self, method: str) -> None:
        assert self.parts[-1] == self._num_layers
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


def skip_reduction_of_one_rank(engine: DeepSpeedEngine, group_size: int) -> None:
    """Do not reduce gradients in a data-parallel group of one rank.

    DeepSpeed: runtime/engine.py, ``buffered_allreduce_fallback`` copies all gradients into a buffer and back even then.
    Test: tests/parallel/test_deepspeed_compat.py. Remove when DeepSpeed returns early for one rank.
    """
    if group_size == 1:
        engine.buffered_allreduce_fallback = lambda grads=None, elements_per_buffer=0: None


def clip_by_model_norm(engine: DeepSpeedEngine, layout: ParallelLayout) -> None:
    """In fp32 at ZeRO 0: clip by the norm of the whole model's gradient, store it, skip steps that are not finite.

    DeepSpeed: runtime/engine.py, ``clip_fp32_gradients`` counts a tied weight once for each stage that holds it, omits
    norms and row-parallel biases of all stages but the first, and discards the norm, so that the update depends on
    the layout. ``_take_model_step`` applies any gradient, even if it is not finite.
    Tests: tests/training/test_layouts_agree.py, test_anomaly_detection.py. Remove when fp32 uses the norm of ZeRO.
    """
    optimizer, step = engine.optimizer, engine.optimizer.step

    def clip_and_step(closure: None = None) -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        norm = gradient_norm(parameters, layout)
        engine._global_grad_norm = norm.item()
        optimizer.overflow = not math.isfinite(engine._global_grad_norm)  # what DeepSpeed calls a skipped step
        if not optimizer.overflow:
            torch.nn.utils.clip_grads_with_norm_(parameters, engine.gradient_clipping() or math.inf, norm)
            step()

    engine.clip_fp32_gradients = lambda: None
    clip_and_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # without this mark torch's scheduler warns
    optimizer.step = clip_and_step


def gradient_norm(parameters: list[nn.Parameter], layout: ParallelLayout) -> Tensor:
    """2-norm of the gradient of the whole model, each weight counted once, on every rank."""
    norms = [
        block_norms(p.grad)
        for p in parameters
        if p.grad is not None
        and not getattr(p, "ds_pipe_replicated", False)  # a tied weight is counted by the first stage that holds it
        and (is_model_parallel_parameter(p) or layout.tensor_group.rank() == 0)
    ]
    square = torch.cat([torch.zeros(1, device=parameters[0].device), *norms]).square().sum()
    dist.all_reduce(square, group=layout.tensor_group)
    dist.all_reduce(square, group=layout.pipe_group)
    return square.sqrt()


_BLOCK = 1 << 16
"""Elements of a block: small enough for a core's cache, and for an accurate sum of squares in fp32."""


def block_norms(tensor: Tensor) -> Tensor:
    """2-norms in fp32 of blocks of ``tensor``. The norm of the result is the norm of the tensor.

    torch on CPU adds squares in fp32 one by one: for 40 million elements the third digit of the norm is wrong.
    """
    if tensor.device.type != "cpu":  # other devices add in a tree
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).view(1)
    return torch.stack([torch.linalg.vector_norm(block.float()) for block in tensor.flatten().split(_BLOCK)])


def measure_norm_by_blocks(optimizer: Any) -> None:
    """Let DeepSpeed's optimizers of ZeRO 1, 2, 3 and of bf16 compute the gradient norm from ``block_norms``.

    DeepSpeed: runtime/zero/stage_1_and_2.py and stage3.py, ``get_grad_norm_direct`` casts each gradient to fp64, up to
    a fifth of a step; runtime/bf16_optimizer.py adds squares as torch does, inaccurately.
    Test: tests/training/test_gradient_norm.py. Remove when the norm is accurate without a copy in fp64.
    """
    if hasattr(optimizer, "get_grad_norm_direct"):
        total_norm = optimizer.get_grad_norm_direct

        def norm_of_blocks(gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
            # The padding of a partition has no parameter; DeepSpeed marks it, and skips it likewise.
            unpadded = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
            return total_norm([block_norms(gradient) for gradient in unpadded], params, norm_type)

        optimizer.get_grad_norm_direct = norm_of_blocks
    elif hasattr(optimizer, "get_grads_for_norm"):
        all_gradients = optimizer.get_grads_for_norm

        def gradients_or_norms(for_clipping: bool = False) -> Any:
            if for_clipping:
                return all_gradients(for_clipping=True)
            shared, of_experts = all_gradients()
            return [block_norms(gradient) for gradient in shared], of_experts

        optimizer.get_grads_for_norm = gradients_or_norms


@contextmanager
def loss_scale_limit_reported() -> Iterator[None]:
    """Raise NumericsError, the same on all ranks, if gradients overflow at the smallest loss scale of fp16.

    DeepSpeed: runtime/fp16/loss_scaler.py, ``update_scale`` raises a bare Exception, known by its text alone.
    Test: tests/training/test_loss_scale.py. Remove when it has a class of its own.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise NumericsError(
            "gradients overflow even at the smallest loss scale, --min-scale: lower --lr, or use --bf16"
        ) from error


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
        reduce = _with_hooks(ReduceGrads, type(engine).allreduce_gradients, hooks)
        replacement = {"allreduce_gradients": reduce.__get__(engine)}
    with _replaced(engine, **replacement):
        yield


@contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
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

    def execute_with_hooks(engine: DeepSpeedEngine, **arguments: Any) -> None:
        phase = arguments.get("phase")
        counts[phase] += 1
        number = counts[phase] if issubclass(kind, BufferOpInstruction) else None
        with inside_hooks(hooks, Instruction(kind.__name__, number, phase)):
            execute(engine, **arguments)

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


@contextmanager
def collectives_timed(now: Callable[[], float], record: Callable[[str, float, float], None]) -> Iterator[None]:
    """While inside, call ``record(name, begin, end)`` for each collective called as ``torch.distributed.NAME``.

    torch 2.13: torch.distributed has no hook for collectives on every backend, so the functions are replaced.
    Test: tests/tools/reporting/test_trace.py. Remove when gloo and nccl both have such a hook.
    """

    def timed(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = now()
            result = function(*arguments, **options)
            record(name, begin, now())
            return result

        return call

    with _replaced(dist, **{name: timed(name, getattr(dist, name)) for name in COLLECTIVES}):
        yield


def use_checkpoint_engine(engine: DeepSpeedEngine, checkpoint_engine: CheckpointEngine) -> None:
    """Write and read the engine's files through ``checkpoint_engine``, and copy no script beside them.

    DeepSpeed: runtime/engine.py. A checkpoint engine can be chosen from DeepSpeed's own only. ``_copy_recovery_script``
    writes a script that unpickles checkpoints into the folder, through any link that lies there.
    Tests: tests/checkpoint/test_saving.py, test_checkpoint_files.py. Remove when the config accepts a class.
    """
    engine.checkpoint_engine = checkpoint_engine
    engine._copy_recovery_script = lambda save_path: None


@contextmanager
def optimizer_shards_not_saved(engine: DeepSpeedEngine) -> Iterator[None]:
    """While inside, ``engine.save_checkpoint`` writes no optimizer shards of ZeRO.

    DeepSpeed: runtime/engine.py, ``save_checkpoint`` has no option for it.
    Test: tests/checkpoint/test_checkpoint_files.py (``--no-save-optim``). Remove when it has one.
    """
    with _replaced(engine, save_zero_checkpoint=False):
        yield
