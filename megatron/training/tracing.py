"""``--trace``: writes down what this rank does in some iterations, and in the end what all ranks did."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.config.output import steps
from megatron.model.transformer import HiddenStates, ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.partition import TRACE
from megatron.parallel.pipeline.schedule import Instruction
from megatron.tools.reporting.measure import measure, unit_seconds
from megatron.tools.reporting.schedule_picture import draw
from megatron.training.engines import Listener
from megatron.training.optional_files import unless_refused
from megatron.training.timeline import Event, Shape, Timeline, to_json

_ROUNDS = 16


def machine() -> str:
    """A name of the running kernel, whose processes have one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def seconds_ahead(clock: Callable[[], float], machine: str) -> float:
    """How far this rank's ``clock`` is ahead of rank 0's; 0.0 on the same ``machine``.

    Every rank must call it. All leave a barrier at about the same time, and over some of them chance evens out. The
    first rank of a machine speaks for the others on it.
    """
    stamps = []
    for _ in range(_ROUNDS):
        dist.barrier()
        stamps.append(clock())
    everyone: list[tuple[str, list[float]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (machine, stamps))
    speaker = next(stamps for place, stamps in everyone if place == machine)
    return median(own - first for own, first in zip(speaker, everyone[0][1], strict=True))


_NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
_TellCollective = Callable[[str, float, float], None]


@contextmanager
def collectives_timed(now: Callable[[], float], tell: _TellCollective) -> Iterator[None]:
    """While inside, call ``tell(name, begin, end)`` for each collective that is called as ``torch.distributed.NAME``.

    torch has no hook for that on every backend, so its functions are replaced while this lasts.
    """
    own = {name: getattr(dist, name) for name in _NAMES}
    for name, function in own.items():
        setattr(dist, name, _timed(name, function, now, tell))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def _timed(name: str, function: Callable, now: Callable[[], float], tell: _TellCollective) -> Callable:
    def call(*arguments: Any, **options: Any) -> Any:
        begin = now()
        result = function(*arguments, **options)
        tell(name, begin, now())
        return result

    return call


_TellLayer = Callable[[int, float, float], None]


@contextmanager
def layers_timed(module: nn.Module, now: Callable[[], float], tell: _TellLayer) -> Iterator[None]:
    """While inside, call ``tell(number, begin, end)`` for each pass through a transformer layer of ``module``.

    A layer's backward pass is from the gradient of its output to that of its input.
    """
    handles = []
    for layer in module.modules():
        if isinstance(layer, ParallelTransformerLayer):
            watch = _Watch(layer.layer_number, now, tell)
            handles.append(layer.register_forward_pre_hook(watch.enter))
            handles.append(layer.register_forward_hook(watch.leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The stop watch of one layer, which runs one pass at a time."""

    def __init__(self, number: int, now: Callable[[], float], tell: _TellLayer) -> None:
        self._number, self._now, self._tell = number, now, tell
        self._entered = self._returned = 0.0

    def enter(self, layer: nn.Module, inputs: tuple[HiddenStates]) -> None:
        hidden = _hidden(inputs[0])
        if hidden.requires_grad and torch.is_grad_enabled():  # it is not where the layer is recomputed later
            hidden.register_hook(self._back_at_input)
        self._entered = self._now()

    def leave(self, layer: nn.Module, inputs: tuple[HiddenStates], output: HiddenStates) -> None:
        self._tell(self._number, self._entered, self._now())
        hidden = _hidden(output)
        if hidden.requires_grad:
            hidden.register_hook(self._back_at_output)

    def _back_at_output(self, grad: Tensor) -> None:
        self._returned = self._now()

    def _back_at_input(self, grad: Tensor) -> None:
        self._tell(self._number, self._returned, self._now())


def _hidden(stream: HiddenStates) -> Tensor:
    return stream[0] if isinstance(stream, tuple) else stream


PICTURE = "schedule.svg"


class Tracer:
    """The timeline of one rank while it is made. Outside of the traced iterations nothing is different."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, module: nn.Module) -> None:
        self._run, self._layout, self._module = run, layout, module
        self._folder = Path(str(run.observe.trace))
        self._left = steps(run.observe.trace_steps)
        self._seen = self._iteration = 0
        self._zero = 0.0
        self._instruction = Instruction("")
        self._events: list[Event] = []

    @contextmanager
    def iteration(self, number: int) -> Iterator[list[Listener]]:
        """Trace iteration ``number``, if it is one of those; the listeners that this takes. Every rank must enter."""
        self._seen += 1
        if self._seen not in self._left:
            yield []
            return
        if self._seen == self._left[0]:
            self._zero = self._start()
        self._iteration = number
        with (
            layers_timed(self._module, self._now, self._hear_layer),
            collectives_timed(self._now, self._hear_collective),
        ):
            yield [self._hear]
        if self._seen == self._left[-1]:
            self.close()

    def close(self) -> None:
        """Write what was traced, if that was not done yet. Every rank must call it."""
        if not self._zero or not self._left:
            return
        self._left = range(0)
        everyone: list[list[Event]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self._events)
        topology, run = self._layout.topology, self._run
        places = [dict(topology.get_coord(rank)._asdict()) for rank in range(len(everyone))]
        shape = Shape(
            run.parallel.pipe_stages,
            run.train.gradient_accumulation_steps,
            run.parallel.pipeline_schedule,
            run.model.num_layers,
        )
        with unless_refused("the trace"):
            self._write(Timeline(shape, places, everyone), self._layout.rank)

    def _write(self, timeline: Timeline, rank: int) -> None:
        """This rank's own file, and the first rank's of all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"rank{rank}.json").write_text(to_json(timeline, [rank]))
        if rank == 0:
            everyone = range(len(timeline.places))
            (self._folder / TRACE).write_text(to_json(timeline, everyone, unit_seconds=unit_seconds(timeline)))
            (self._folder / PICTURE).write_text(draw(timeline, measure(timeline)))

    @contextmanager
    def _hear(self, instruction: Instruction) -> Iterator[None]:
        around, self._instruction = self._instruction, instruction
        begin = self._now()
        yield
        self._add(begin, self._now())
        self._instruction = around

    def _hear_layer(self, number: int, begin: float, end: float) -> None:
        self._add(begin, end, layer=number)

    def _hear_collective(self, name: str, begin: float, end: float) -> None:
        if self._instruction.name:
            self._add(begin, end, collective=name)

    def _add(self, begin: float, end: float, **part: Any) -> None:
        name, micro_batch, phase = self._instruction
        self._events.append(Event(name, begin, end, self._iteration, micro_batch, phase, **part))

    def _start(self) -> float:
        """What this rank's clock shows when that of rank 0 showed what it does as the first rank sets off."""
        starts: list[float] = [0.0] * dist.get_world_size()
        ahead = seconds_ahead(time.perf_counter, machine())
        dist.all_gather_object(starts, time.perf_counter() - ahead)
        return min(starts) + ahead

    def _now(self) -> float:
        """Seconds since the start, when all that was given to the device is done."""
        get_accelerator().synchronize()
        return time.perf_counter() - self._zero
