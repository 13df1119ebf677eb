"""Records an iteration on each rank of a run: the outputs of all modules, their gradients, and collectives.

A tensor's name is the number of its layer in the model and the path of its module in the layer, which are the same on
every layout. A module that tied layers share has the number of the layer in which it runs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from megatron.config import RunConfig
from megatron.engines.engine import Engine
from megatron.engines.overrides import collectives_wrapped
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction
from megatron.parallel.tensor.layers import ColumnParallelLinear, WeightInit
from megatron.tools.verify.shards import Key, Name, Place, Rank
from megatron.training import setup

_GROUPS = ("tensor", "data", "pipe", "model", "ring", "ulysses", "sequence", "replica", "expert", "expert_data")
"""Process groups of a layout. A collective is counted under the first of those that are the same group."""


def record_run(folder: str, iteration: int) -> None:
    """Patch ``build_engine`` so that this process records training ``iteration``, from 1 on, in ``folder``."""
    build = setup.build_engine

    def build_recorded(run: RunConfig, layout: ParallelLayout, *arguments: Any) -> Engine:
        engine = build(run, layout, *arguments)
        train_batch, numbers = engine.train_batch, count(1)

        def train_recorded(batches: Any) -> Tensor:
            if next(numbers) != iteration:
                return train_batch(batches)
            recorder = Recorder(engine, run, layout)
            with recorder.recording():
                loss = train_batch(batches)
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(recorder.rank, Path(folder) / f"rank{layout.rank}.pt")
            return loss

        engine.train_batch = train_recorded
        return engine

    setup.build_engine = build_recorded  # type: ignore[assignment]


def perturb_weights(relative: float, number: int) -> None:
    """Patch the initialization to change each weight by ``relative``, with signs drawn with ``number``."""
    draw = WeightInit.draw

    def perturbed(init: WeightInit, shape: tuple[int, ...]) -> Tensor:
        signs = draw(replace(init, name=f"{init.name}/rounding {number}"), shape).sign()
        return draw(init, shape) * (1 + relative * signs)

    WeightInit.draw = perturbed  # type: ignore[assignment, method-assign]


class Recorder:
    """Records the tensors and collectives of the current iteration on one rank."""

    def __init__(self, engine: Engine, run: RunConfig, layout: ParallelLayout):
        self._engine, self._layout = engine, layout
        self._micro_batches = engine.gradient_accumulation_steps()
        model, data = run.model, layout.data_group
        senders = [layout.rank] if layout.expert_group is None else dist.get_process_group_ranks(layout.expert_group)
        self.rank = Rank(
            layout.rank,
            _place(layout),
            vocabulary=(model.vocab_size, model.padded_vocab_size),
            lengths=(run.data.seq_length, run.data.decoder_seq_length or 0),
            experts=model.num_experts,
            senders=[(dist.get_group_rank(data, rank) - data.rank()) * self._micro_batches for rank in senders],
        )
        self._instruction = Instruction("")
        self._calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._last_gradient = ""
        self._layers = list(_layers(engine.module))
        self._gradient_scale = self._micro_batches / float(getattr(engine.optimizer, "loss_scale", 1.0))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the ``with`` block."""
        module = self._engine.module
        self._engine.wait_for_weights()
        with ExitStack() as stack:
            for layer in self._layers:
                for path, part in layer.module.named_modules():
                    enter, leave = partial(self._enter, layer, path), partial(self._leave, layer, path)
                    stack.callback(part.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    stack.callback(part.register_forward_hook(leave).remove)
            if hasattr(module, "loss_fn"):
                loss_fn = module.loss_fn
                module.loss_fn = _RecordedLoss(loss_fn, self._loss)
                stack.callback(setattr, module, "loss_fn", loss_fn)
            hooks = self._engine.hooks
            self._engine.hooks = [*hooks, self._instruct]
            stack.callback(setattr, self._engine, "hooks", hooks)
            stack.enter_context(collectives_wrapped(self._wrap))
            yield

    @contextmanager
    def _instruct(self, instruction: Instruction) -> Iterator[None]:
        enclosing, self._instruction = self._instruction, instruction
        self._calls.clear()
        self._last_gradient = instruction.name
        if instruction.name == "ForwardPass":
            for layer in self._layers:
                layer.begin(instruction.phase)
        yield
        self._instruction = enclosing

    @property
    def _is_forward(self) -> bool:
        return self._instruction.name == "ForwardPass"

    @property
    def _micro_batch(self) -> int:
        """Number of the current micro-batch among those of all data-parallel ranks."""
        return self._layout.data_group.rank() * self._micro_batches + (self._instruction.micro_batch or 1) - 1

    def _enter(self, layer: "_Layer", path: str, module: nn.Module, inputs: tuple, options: dict) -> None:
        if torch.compiler.is_compiling():
            return
        if not path and self._is_forward:
            layer.next_use()
        name = layer.name(path)
        self._running.append(name)
        tensors = _tensors((inputs, options))
        if not path and self._is_forward:
            for part, tensor in enumerate(tensors):
                if not hasattr(tensor, "recorded_as"):
                    self._record(Name(f"{name}.input", part=part), tensor)
            self.rank.inputs[name] = [tensor.recorded_as for tensor in tensors]  # type: ignore[attr-defined]
        self._note_inputs(name, tensors)

    def _leave(self, layer: "_Layer", path: str, module: nn.Module, inputs: tuple, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._running.pop()
        if self._is_forward and name not in self.rank.classes:
            self.rank.classes[name] = type(module).__name__
            weights = (weight.detach().double() for weight in module.parameters(recurse=False))
            self.rank.weights[name] = [weight.norm().item() for weight in weights]
        if isinstance(module, ColumnParallelLinear) and module.weight.dim() == 3:
            self.rank.parts[name] = module.weight.size(0)
        self._record_output(name, output)

    def _note_inputs(self, module: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if hasattr(tensor, "recorded_as"):
                self.rank.consumers[tensor.recorded_as].append(module)

    def _record_output(self, module: str, output: Any) -> None:
        """Record the output of a module, except tensors that a submodule or the caller already produced."""
        call = self._calls[module]
        self._calls[module] += 1
        for part, tensor in enumerate(_tensors(output)):
            if not hasattr(tensor, "recorded_as"):
                self._record(Name(module, call, part), tensor)

    def _record(self, name: Name, tensor: Tensor) -> None:
        tensor.recorded_as = name  # type: ignore[attr-defined]
        key = Key(self._micro_batch, name)
        if self._is_forward:
            self.rank.tensors[key] = tensor.detach().to("cpu", copy=True)
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(partial(self._on_gradient, key._replace(is_gradient=True)))

    def _on_gradient(self, key: Key, gradient: Tensor) -> None:
        self._last_gradient = key.name.module
        self.rank.tensors[key] = gradient.detach().to("cpu", torch.float32, copy=True) * self._gradient_scale

    def _loss(self, loss_fn: Callable, outputs: Any, targets: Any) -> Tensor:
        self._record_output("targets", targets)
        self._note_inputs("loss", _tensors(outputs))
        self._running.append("loss")
        loss = loss_fn(outputs, targets)
        self._record_output(self._running.pop(), loss)
        return loss

    def _wrap(self, name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            group = next((value for value in (*arguments, *options.values()) if isinstance(value, ProcessGroup)), None)
            module = self._running[-1] if self._running else self._last_gradient
            collective = f"{name} of the {self._axis(group)} group"
            self.rank.collectives["iteration", False].append(collective)
            if self._instruction.micro_batch in (None, 1):
                self.rank.collectives[module, not self._running].append(collective)
            return function(*arguments, **options)

        return call

    def _axis(self, group: ProcessGroup | None) -> str:
        return next((axis for axis in _GROUPS if getattr(self._layout, f"{axis}_group") is group), "other")


class _RecordedLoss:
    """A proxy of a loss function whose calls go through ``record``."""

    def __init__(self, loss_fn: Callable, record: Callable):
        self._loss_fn, self._record = loss_fn, record

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self._record(self._loss_fn, outputs, targets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss_fn, name)


class _Layer:
    """A module in the list of layers, with all its (chunk, number of the layer) in this list."""

    def __init__(self, module: nn.Module, uses: list[tuple[int, int]]):
        self.module, self._uses = module, uses
        self._next_numbers: list[int] = []
        self._number = uses[0][1]

    def begin(self, chunk: int | None) -> None:
        """Begin a forward pass through a chunk of the stage."""
        self._next_numbers = [number for used_chunk, number in self._uses if used_chunk == (chunk or 0)]

    def next_use(self) -> None:
        """Take the number of the module's next use in this pass."""
        self._number = self._next_numbers.pop(0) if self._next_numbers else self._number

    def name(self, path: str) -> str:
        """The name of the submodule ``path``, with the number of the layer."""
        return f"{self._number}.{path}" if path else str(self._number)


def _layers(module: Any) -> Iterator[_Layer]:
    """The layers of this rank that are modules; a model that is not a list of layers is layer 0."""
    if not hasattr(module, "forward_funcs"):
        yield _Layer(module, [(0, 0)])
        return
    chunks = getattr(module, "_layers_of_chunks", [module.forward_funcs])
    starts = [module.parts[chunk] for chunk in module.chunks] if hasattr(module, "chunks") else [0]
    uses: dict[nn.Module, list[tuple[int, int]]] = defaultdict(list)
    for chunk, (start, layers) in enumerate(zip(starts, chunks, strict=True)):
        for number, layer in enumerate(layers, start):
            shared = layer.args[0] if isinstance(layer, partial) else layer
            if isinstance(shared, nn.Module):
                uses[shared].append((chunk, number))
    for used, numbers in uses.items():
        yield _Layer(used, numbers)


def _place(layout: ParallelLayout) -> Place:
    groups = (layout.tensor_group, layout.ring_group, layout.ulysses_group, layout.expert_group)
    tensor, ring, ulysses, expert = ((0, 1) if group is None else (group.rank(), group.size()) for group in groups)
    return Place(tensor, ring, ulysses, expert, layout.pipe_group.rank(), layout.sequence_parallel)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
