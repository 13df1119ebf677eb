"""Callbacks that trace and profile chosen iterations: ``--trace`` and ``--profile-steps``."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn, profiler

from megatron.common.files import UNFINISHED, replace_file
from megatron.config import RunConfig
from megatron.config.output import steps
from megatron.engines.overrides import collectives_wrapped
from megatron.model.partition import TRACE
from megatron.model.transformer import HiddenStates, ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.tools.reporting.files import to_json
from megatron.tools.reporting.timeline import Event, Shape, Timeline, measure, unit_seconds
from megatron.training.callbacks import Callback, warn_if_unwritable

PICTURE = "schedule.svg"
_CLOCK_ROUNDS = 16
_PROFILE_ROWS = 40


def requested_traces(run: RunConfig, layout: ParallelLayout, module: nn.Module) -> list[Callback]:
    """The profiler and the tracer, if ``run`` asks for them."""
    if run.observe.profiles:
        with warn_if_unwritable("profiles"):
            Path(str(run.observe.profile_dir)).mkdir(parents=True, exist_ok=True)
    requested: list[Callback] = []
    if run.observe.profile_steps is not None:
        requested.append(Profiler(run, layout.rank))
    if run.observe.trace is not None:
        requested.append(Tracer(run, layout, module))
    return requested


class Profiler(Callback):
    """Runs torch's profiler on one rank, with the engine's instructions as ranges."""

    def __init__(self, run: RunConfig, rank: int) -> None:
        self._folder, self._rank = Path(str(run.observe.profile_dir)), rank
        self._steps, self._step = steps(str(run.observe.profile_steps)), 0
        self._profile: profiler.profile | None = None

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Profile the iteration if it is one of ``--profile-steps``."""
        self._step += 1
        if self._step not in self._steps:
            yield ()
            return
        if self._profile is None:
            self._profile = profiler.profile(record_shapes=True)
            self._profile.start()
        with profiler.record_function(f"iteration {iteration}"):
            yield [lambda instruction: profiler.record_function(str(instruction))]
        if self._step == self._steps[-1]:
            self.on_run_end()

    def on_run_end(self) -> None:
        """Write the profile, unless that has been done."""
        if self._profile is None or not self._steps:
            return
        self._steps = range(0)
        self._profile.stop()
        averages = self._profile.key_averages()
        device = "device" if any(row.self_device_time_total for row in averages) else "cpu"
        table = averages.table(sort_by=f"self_{device}_time_total", row_limit=_PROFILE_ROWS)
        with warn_if_unwritable("the profile"):
            with replace_file(self._folder / f"profile-rank{self._rank}.txt", text=True, durable=False) as file:
                file.write(table)
            self._export(self._folder / f"profile-rank{self._rank}.json")
            if self._rank == 0:
                print(f"  wrote the profile to {self._folder}: profile-rank*.txt and .json", flush=True)

    def _export(self, file: Path) -> None:
        """Replace the timeline. Raises OSError if no file results: torch only logs its errors."""
        assert self._profile is not None
        with TemporaryDirectory(UNFINISHED, ".", file.parent, ignore_cleanup_errors=True) as folder:
            self._profile.export_chrome_trace(str(written := Path(folder, file.name)))
            if not written.exists():
                raise OSError(errno.EIO, "torch did not write it", str(file))
            os.replace(written, file)


class Tracer(Callback):
    """Records the timeline of this rank. Iterations that are not traced run unchanged."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, module: nn.Module) -> None:
        self._run, self._layout, self._module = run, layout, module
        self._folder = Path(str(run.observe.trace))
        self._steps = steps(run.observe.trace_steps)
        self._step = self._iteration = 0
        self._zero = 0.0
        """Time at the start of the timeline, on this rank's clock."""
        self._instruction = Instruction("")
        self._events: list[Event] = []

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Trace the iteration if it is one of ``--trace-steps``."""
        self._step += 1
        if self._step not in self._steps:
            yield ()
            return
        if self._step == self._steps[0]:
            self._zero = self._start()
        self._iteration = iteration
        with (
            layers_timed(self._module, self._now, self._record_layer),
            collectives_timed(self._now, self._record_collective),
        ):
            yield [self._record_instruction]
        if self._step == self._steps[-1]:
            self.on_run_end()

    def on_run_end(self) -> None:
        """Gather the events of all ranks and write the trace, unless that has been done. Every rank must call it."""
        if not self._zero or not self._steps:
            return
        self._steps = range(0)
        events: list[list[Event]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(events, self._events)
        run, places = self._run, {rank: place for place, rank in self._layout.topology.mapping.items()}
        coordinates = [dict(places[rank]._asdict()) for rank in range(len(events))]
        shape = Shape(
            run.parallel.pipe_stages,
            run.train.micro_batches(self._iteration),
            run.parallel.pipeline_schedule,
            run.model.num_layers,
            run.parallel.model_chunks // run.parallel.pipe_stages,
        )
        if self._layout.rank == 0:
            with warn_if_unwritable("the trace"):
                self._write(Timeline(shape, coordinates, events))

    def _write(self, timeline: Timeline) -> None:
        """Write the trace of all ranks, and its chart."""
        from megatron.tools.reporting.pictures import draw

        self._folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            (TRACE, to_json(timeline, unit_seconds=unit_seconds(timeline))),
            (PICTURE, draw(timeline, measure(timeline))),
        ):
            with replace_file(self._folder / name, text=True, durable=False) as file:
                file.write(text)
        print(f"  wrote the trace to {self._folder}: {TRACE}, {PICTURE}", flush=True)

    @contextmanager
    def _record_instruction(self, instruction: Instruction) -> Iterator[None]:
        enclosing, self._instruction = self._instruction, instruction
        begin = self._now()
        yield
        self._record(begin, self._now())
        self._instruction = enclosing

    def _record_layer(self, number: int, begin: float, end: float) -> None:
        self._record(begin, end, layer=number)

    def _record_collective(self, name: str, begin: float, end: float) -> None:
        if self._instruction.name:
            self._record(begin, end, collective=name)

    def _record(self, begin: float, end: float, **details: Any) -> None:
        name, micro_batch, phase = self._instruction
        self._events.append(Event(name, begin, end, self._iteration, micro_batch, phase, **details))

    def _start(self) -> float:
        """The earliest start of any rank, on this rank's clock."""
        starts: list[float] = [0.0] * dist.get_world_size()
        ahead = seconds_ahead(time.perf_counter, machine())
        dist.all_gather_object(starts, time.perf_counter() - ahead)
        return min(starts) + ahead

    def _now(self) -> float:
        """Seconds since the start of the timeline, after the device has finished its work."""
        get_accelerator().synchronize()
        return time.perf_counter() - self._zero


def machine() -> str:
    """An identifier of the running kernel, whose processes share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def seconds_ahead(clock: Callable[[], float], machine: str) -> float:
    """Offset of this rank's ``clock`` from rank 0's; 0.0 on the same ``machine``. Every rank must call it.

    All ranks leave a barrier at about the same time; the median over several barriers removes most of the noise. All
    ranks of a machine use the measurement of its first rank.
    """
    stamps = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier()
        stamps.append(clock())
    all_stamps: list[tuple[str, list[float]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(all_stamps, (machine, stamps))
    first_here = next(times for name, times in all_stamps if name == machine)
    return median(here - there for here, there in zip(first_here, all_stamps[0][1], strict=True))


_RecordLayer = Callable[[int, float, float], None]


@contextmanager
def layers_timed(module: nn.Module, now: Callable[[], float], record: _RecordLayer) -> Iterator[None]:
    """A context that calls ``record(number, begin, end)`` for each pass through a transformer layer of ``module``.

    A layer's backward pass is the time from the gradient of its output to the gradient of its input.
    """
    handles = []
    for layer in module.modules():
        if isinstance(layer, ParallelTransformerLayer):
            timer = _LayerTimer(layer.layer_number, now, record)
            handles.append(layer.register_forward_pre_hook(timer.before_forward))
            handles.append(layer.register_forward_hook(timer.after_forward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _LayerTimer:
    """Times the forward and backward passes of one layer, which must not overlap."""

    def __init__(self, number: int, now: Callable[[], float], record: _RecordLayer) -> None:
        self._number, self._now, self._record = number, now, record
        self._forward_begin = self._backward_begin = 0.0

    def before_forward(self, layer: nn.Module, inputs: tuple[HiddenStates]) -> None:
        hidden = _tensor(inputs[0])
        # In the first forward pass of a recomputed layer there is no gradient to wait for.
        if hidden.requires_grad and torch.is_grad_enabled():
            hidden.register_hook(self._input_gradient)
        self._forward_begin = self._now()

    def after_forward(self, layer: nn.Module, inputs: tuple[HiddenStates], output: HiddenStates) -> None:
        self._record(self._number, self._forward_begin, self._now())
        hidden = _tensor(output)
        if hidden.requires_grad:
            hidden.register_hook(self._output_gradient)

    def _output_gradient(self, grad: Tensor) -> None:
        self._backward_begin = self._now()

    def _input_gradient(self, grad: Tensor) -> None:
        self._record(self._number, self._backward_begin, self._now())


def _tensor(hidden_states: HiddenStates) -> Tensor:
    return hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states


@contextmanager
def collectives_timed(now: Callable[[], float], record: Callable[[str, float, float], None]) -> Iterator[None]:
    """A context that calls ``record(name, begin, end)`` for each collective called as ``torch.distributed.NAME``."""

    def timed(name: str, function: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = now()
            result = function(*arguments, **options)
            record(name, begin, now())
            return result

        return call

    with collectives_wrapped(timed):
        yield
