"""``--trace``: writes down what this rank does in some iterations, and in the end what all ranks did."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from megatron.arguments.repartition import TRACE
from megatron.config import RunConfig
from megatron.config.observe import steps
from megatron.engine import Listener
from megatron.mpu.layout import ParallelLayout
from megatron.observe.files import unless_refused
from megatron.observe.trace.clocks import machine, seconds_ahead
from megatron.observe.trace.collectives import collectives_timed
from megatron.observe.trace.layers import layers_timed
from megatron.observe.trace.measure import measure, unit_seconds
from megatron.observe.trace.picture import draw
from megatron.observe.trace.timeline import Event, Shape, Timeline, to_json
from megatron.pipe_schedule import Instruction

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
