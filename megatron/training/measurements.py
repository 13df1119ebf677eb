"""What a run measures on request: norm of the parameters, zeros in the gradient, the use of experts, times of phases
and slow hosts.
"""

import json
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from megatron.checkpoint.collective_errors import gathered_on_rank_0
from megatron.checkpoint.files import replace_text
from megatron.config import RunConfig
from megatron.engines.gradients import block_norms, counted_once, sum_over_model
from megatron.model.moe import routers
from megatron.model.partition import plan
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.training.callbacks import Callback, warn_if_unwritable
from megatron.training.metrics import TIMER, expert_load


def requested_measurements(run: RunConfig, layout: ParallelLayout, module: nn.Module) -> list[Callback]:
    """The measurements that ``run`` asks for. Phases are timed last, so that they do not include the others."""
    logging = run.logging
    requested: list[Callback] = [ExpertBalance(run, layout, module)] if run.model.has_experts else []
    if logging.log_num_zeros_in_grad:
        requested.append(ZerosInGradient(run, layout, module))
    if logging.log_params_norm:
        requested.append(ParamsNorm(layout, module))
    if logging.timing_log_level:
        requested.append(PhaseTimers(logging.timing_log_level))
    if logging.straggler_report is not None:
        requested.append(StragglerReport(run, layout))
    return requested


def params_norm(module: nn.Module, layout: ParallelLayout) -> Tensor:
    """2-norm [] of all parameters of the model, each counted once. Every rank must call it, also at ZeRO 3."""
    squares = torch.zeros(2, device=get_accelerator().current_device_name())
    for parameter in counted_once(module.parameters(), layout):
        is_partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if is_partitioned else nullcontext():
            square = block_norms(parameter.detach()).square().sum()
            squares[int(is_moe_param(parameter))] += square.to(squares.device)
    return sum_over_model(squares, layout).sqrt()


def zeros_in_gradient(module: nn.Module, layout: ParallelLayout) -> Tensor:
    """How many elements of the whole model's gradient are 0, int64 [], between backward and step. Every rank must call
    it.

    As in Megatron-LM each weight is counted once, and rows that pad the vocabulary, whose gradient is 0, are counted.
    """
    zeros = torch.zeros(2, dtype=torch.int64, device=get_accelerator().current_device_name())
    for parameter in counted_once(module.parameters(), layout):
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            zeros[int(is_moe_param(parameter))] += gradient.numel() - gradient.count_nonzero()
    return sum_over_model(zeros, layout)


class ParamsNorm(Callback):
    """``--log-params-norm``: the norm of the parameters after the logged iteration."""

    def __init__(self, layout: ParallelLayout, module: nn.Module) -> None:
        self._layout, self._module = layout, module

    def metrics(self) -> Mapping[str, Tensor]:
        """``params_norm``."""
        return {"params_norm": params_norm(self._module, self._layout)}


class ExpertBalance(Callback):
    """How a mixture of experts uses its experts: means over micro-batches and ranks since the last logged iteration."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, module: nn.Module) -> None:
        self._layout, self._routers, self._model = layout, routers(module), run.model

    def metrics(self) -> Mapping[str, Tensor]:
        """The auxiliary losses, without their weights, and the router's entropy, as means over layers; the largest and
        the smallest share of an expert in the tokens of its layer, 1 being an equal share; dropped tokens."""
        device = get_accelerator().current_device_name()
        model, replicas = self._model, self._layout.get_sequence_data_parallel_group()
        loads = torch.full((model.num_layers, model.num_experts), -torch.inf, dtype=torch.float64, device=device)
        layers = [(router.layer_number, m) for router in self._routers if (m := router.take_measured())]
        names = ("balance", "z", "entropy", "dropped")
        sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
        for number, measured in layers:
            means = [measured.get(name, torch.zeros(())) / measured["micro_batches"] for name in names]
            sums += torch.stack([*(mean.to(device) for mean in means), torch.ones_like(sums[0])])
            share = measured["share"] / measured["micro_batches"] * measured["share"].numel()
            dist.all_reduce(share, group=replicas)
            loads[number - 1] = share / replicas.size()
        dist.all_reduce(sums)
        dist.all_reduce(loads, dist.ReduceOp.MAX)
        balance, z, entropy, dropped = sums[:-1] / sums[-1]
        values = {"load_balancing_loss": balance, "z_loss": z, "router_entropy": entropy}
        smallest = loads.masked_fill(loads < 0, torch.inf).min()  # layers without experts have no load
        values |= {"largest_expert_load": loads.max(), "smallest_expert_load": smallest}
        values |= {"dropped_tokens": dropped} if model.moe_expert_capacity_factor else {}
        return values | (_named(loads) if model.moe_per_layer_logging else {})


def _named(loads: Tensor) -> dict[str, Tensor]:
    """``loads`` [layers, E] by name, without those of layers that have no experts."""
    return {
        expert_load(layer, expert): load
        for layer, of_layer in enumerate(loads, 1)
        if of_layer.isfinite().all()
        for expert, load in enumerate(of_layer)
    }


class ZerosInGradient(Callback):
    """``--log-num-zeros-in-grad``: the zeros in the gradient of the logged iteration."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, module: nn.Module) -> None:
        self._run, self._layout, self._module = run, layout, module
        self._last_micro_batch = 0
        self._zeros: float | Tensor = 0

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Count before the optimizer step if the iteration is logged."""
        self._last_micro_batch = self._run.train.micro_batches(iteration)
        yield [self._count] if self._run.is_logged(iteration) else ()

    def metrics(self) -> Mapping[str, float | Tensor]:
        """``num_zeros_in_grad``."""
        return {"num_zeros_in_grad": self._zeros}

    @contextmanager
    def _count(self, instruction: Instruction) -> Iterator[None]:
        # DeepSpeedEngine is asked for a step after each micro-batch, and makes it after the last one.
        if instruction.name == "OptimizerStep" and instruction.micro_batch in (None, self._last_micro_batch):
            self._zeros = zeros_in_gradient(self._module, self._layout)
        yield


_REST = "forward-backward"
"""The timer of an iteration without its other phases of level 1."""
_PHASES = {
    1: {
        "ReduceTiedGrads": "embedding-grads-all-reduce",
        "ReduceGrads": "all-grads-sync",
        "OptimizerStep": "optimizer",
    },
    2: {
        "LoadMicroBatch": "batch-generator",
        "ForwardPass": "forward-compute",
        "BackwardPass": "backward-compute",
        "RecvActivation": "forward-recv",
        "SendActivation": "forward-send",
        "RecvGrad": "backward-recv",
        "SendGrad": "backward-send",
    },
}
"""For each level Megatron-LM's names of the timers that it adds, by DeepSpeed's names of the instructions."""


class PhaseTimers(Callback):
    """``--timing-log-level``: seconds per iteration in each phase; a phase inside another one counts only itself."""

    def __init__(self, level: int) -> None:
        self._phases = {name: timer for least in range(1, level + 1) for name, timer in _PHASES[least].items()}
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
        own = torch.tensor([(seconds.get(name, -torch.inf), -seconds.get(name, torch.inf)) for name in timers])
        extremes = own.to(get_accelerator().current_device_name())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        pairs = zip(timers, extremes.tolist(), strict=True)
        across = {name: (-least, most) for name, (most, least) in pairs if most > -torch.inf}
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
        return sum(self._seconds.get(timer, 0.0) for timer in _PHASES[1].values())


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
        self._seconds, self._iterations = 0.0, 0
        return {"slow_hosts": gathered_on_rank_0(lambda: own, self._report)}

    def _report(self, times: Sequence[RankTime]) -> int:
        """The number of slow hosts, which are printed, and written for an elastic agent."""
        slow = slow_hosts(times, self._share)
        for host, share in slow.items():
            print(f"  warning: host {host} is slow: its ranks compute {share:.0%} longer than others", flush=True)
        if self._folder is not None:
            ranks = [rank for rank, one in enumerate(times) if one.host in slow]
            with warn_if_unwritable(STRAGGLERS):
                replace_text(self._folder / STRAGGLERS, json.dumps({"hosts": slow, "ranks": ranks}))
        return len(slow)


def now() -> float:
    """Seconds, after the device has finished its work."""
    get_accelerator().synchronize()
    return time.perf_counter()
