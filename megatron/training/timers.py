"""Timers that a run can switch on: seconds of each phase of an iteration, and a report of slower hosts."""

import json
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.checkpoint.files import replace_text
from megatron.config import RunConfig
from megatron.model.partition import plan
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.training.callbacks import Callback, warn_if_unwritable
from megatron.training.metrics import TIMER


class Phase(NamedTuple):
    """A phase of an iteration: Megatron-LM's name of its timer, and the level from which on it is timed."""

    timer: str
    level: int


_REST = "forward-backward"
"""The timer of an iteration without its other phases of level 1."""
PHASES = {
    "ReduceTiedGrads": Phase("embedding-grads-all-reduce", 1),
    "ReduceGrads": Phase("all-grads-sync", 1),
    "OptimizerStep": Phase("optimizer", 1),
    "LoadMicroBatch": Phase("batch-generator", 2),
    "ForwardPass": Phase("forward-compute", 2),
    "BackwardPass": Phase("backward-compute", 2),
    "RecvActivation": Phase("forward-recv", 2),
    "SendActivation": Phase("forward-send", 2),
    "RecvGrad": Phase("backward-recv", 2),
    "SendGrad": Phase("backward-send", 2),
    "CommitP2P": Phase("forward-backward-send-forward-backward-recv", 2),
}
"""By DeepSpeed's names of the instructions."""


class PhaseTimers(Callback):
    """``--timing-log-level``: seconds per iteration in each phase; a phase inside another one counts only itself."""

    def __init__(self, level: int) -> None:
        self._phases = {name: phase.timer for name, phase in PHASES.items() if phase.level <= level}
        self._level_1 = [phase.timer for phase in PHASES.values() if phase.level == 1]
        self._seconds: dict[str, float] = defaultdict(float)
        self._iterations = 0
        self._inside = 0.0
        """Seconds of the phases inside the present one."""

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Time the iteration."""
        begin, others = now(), self._sum_of_level_1()
        yield [self._time]
        self._seconds[_REST] += now() - begin - (self._sum_of_level_1() - others)
        self._iterations += 1

    def metrics(self) -> Mapping[str, float]:
        """``NAME-time`` of each timer: the mean seconds per iteration since the last call, of the slowest rank.

        Prints the least and the most of all ranks, as Megatron-LM does. Every rank must call it.
        """
        timers = [_REST, *self._phases.values()]
        seconds = {name: self._seconds[name] / max(self._iterations, 1) for name in timers if name in self._seconds}
        across = min_max_across_ranks(timers, seconds)
        self._seconds.clear()
        self._iterations = 0
        if dist.get_rank() == 0:
            print("(min, max) time across ranks (ms):")
            for name, (least, most) in across.items():
                print(f"    {name + ' ':.<48}: ({least * 1000:.2f}, {most * 1000:.2f})", flush=True)
        return {f"{name}{TIMER}": most for name, (_, most) in across.items()}

    @contextmanager
    def _time(self, instruction: Instruction) -> Iterator[None]:
        if instruction.name not in self._phases:
            yield
            return
        enclosing, self._inside = self._inside, 0.0
        begin = now()
        yield
        seconds = now() - begin
        self._seconds[self._phases[instruction.name]] += seconds - self._inside
        self._inside = enclosing + seconds

    def _sum_of_level_1(self) -> float:
        return sum(self._seconds.get(name, 0.0) for name in self._level_1)


STRAGGLERS = "stragglers.json"
"""In --save: the slow hosts of the last window, for ``tools/launch.py --exclude-stragglers``."""
_COMPUTING = ("ForwardPass", "BackwardPass", "BackwardInputPass", "BackwardWeightPass")


class RankTime(NamedTuple):
    """What a rank reports."""

    host: str
    stage: int
    seconds: float
    """In forward and backward passes, per iteration."""
    cost: float
    """FLOPs of its stage, in any unit."""


def slow_hosts(times: Sequence[RankTime], share: float) -> dict[str, float]:
    """The hosts that take more than ``share`` longer than the others for the same work, each with its share.

    A rank is compared with the ranks of other hosts that hold the same pipeline stage, and if there are none with all
    ranks, by their FLOPs. A host is as slow as the median of its ranks: those of one tensor-parallel group wait for
    each other.
    """
    found = defaultdict(list)
    for one in times:
        others = [other for other in times if other.host != one.host]
        same = [other.seconds for other in others if other.stage == one.stage]
        usual = [other.seconds * one.cost / other.cost for other in others if other.cost and one.cost]
        if expected := statistics.median(same or usual or [0.0]):
            found[one.host].append(one.seconds / expected - 1)
    longer = {host: statistics.median(shares) for host, shares in found.items()}
    return {host: value for host, value in longer.items() if value > share}


class StragglerReport(Callback):
    """``--straggler-report``: names slow hosts at the first logged iteration after each window."""

    def __init__(self, run: RunConfig, layout: ParallelLayout) -> None:
        self._share, self._window = run.logging.straggler_report or 0.0, run.logging.straggler_window
        self._folder = Path(run.checkpoint.save) if run.checkpoint.save else None
        self._stage = layout.pipe_group.rank()
        has_spec = run.model.padded_vocab_size > 0
        self._cost = float(plan(run)[self._stage].flops(run.data.seq_length)) if has_spec else 0.0
        self._seconds, self._iterations = 0.0, 0

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Time forward and backward passes."""
        yield [self._time]
        self._iterations += 1

    @contextmanager
    def _time(self, instruction: Instruction) -> Iterator[None]:
        begin = now() if instruction.name in _COMPUTING else None
        yield
        if begin is not None:
            self._seconds += now() - begin

    def metrics(self) -> Mapping[str, float]:
        """``slow_hosts``, their number, once per window. Every rank must call it."""
        if self._iterations < self._window:
            return {}
        own = RankTime(socket.gethostname(), self._stage, self._seconds / self._iterations, self._cost)
        times: list[RankTime | None] = [None] * dist.get_world_size()
        dist.all_gather_object(times, own)
        slow = slow_hosts([one for one in times if one is not None], self._share)
        self._seconds, self._iterations = 0.0, 0
        if dist.get_rank() == 0:
            self._report(slow, times)
        return {"slow_hosts": len(slow)}

    def _report(self, slow: Mapping[str, float], times: Sequence[RankTime | None]) -> None:
        for host, share in slow.items():
            print(f"  warning: host {host} is slow: its ranks compute {share:.0%} longer than others", flush=True)
        if self._folder is not None:
            ranks = [rank for rank, one in enumerate(times) if one is not None and one.host in slow]
            with warn_if_unwritable(STRAGGLERS):
                replace_text(self._folder / STRAGGLERS, json.dumps({"hosts": slow, "ranks": ranks}))


def min_max_across_ranks(names: Sequence[str], values: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of each name over the ranks that have one, in one all-reduce."""
    own = torch.tensor([(values.get(name, -torch.inf), -values.get(name, torch.inf)) for name in names])
    extremes = own.to(get_accelerator().current_device_name())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return {
        name: (-negative, greatest)
        for name, (greatest, negative) in zip(names, extremes.tolist(), strict=True)
        if greatest > -torch.inf
    }


def now() -> float:
    """Seconds, after the device has finished its work."""
    get_accelerator().synchronize()
    return time.perf_counter()
