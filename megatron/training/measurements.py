"""Optional measurements, as callbacks: parameter norm, zeros in the gradient, expert load, timers and stragglers."""

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
from megatron.engines.gradient_norm import block_norms, counted_once, sum_over_model
from megatron.model.moe import routers
from megatron.model.partition import plan
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.training.callbacks import Callback, warn_if_unwritable
from megatron.training.metrics import TIMER, expert_load


def requested_measurements(run: RunConfig, layout: ParallelLayout, module: nn.Module) -> list[Callback]:
    """The measurements that ``run`` requests. Timers come last, so that they do not time the other measurements."""
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
    """2-norm [] of all parameters of the model, each counted once, at any ZeRO stage. Every rank must call it."""
    squares = torch.zeros(2, device=get_accelerator().current_device_name())
    for parameter in counted_once(module.parameters(), layout):
        is_partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if is_partitioned else nullcontext():
            square = block_norms(parameter.detach()).square().sum()
            squares[int(is_moe_param(parameter))] += square.to(squares.device)
    return sum_over_model(squares, layout).sqrt()


def zeros_in_gradient(module: nn.Module, layout: ParallelLayout) -> Tensor:
    """Number of zeros in the gradient of the full model, int64 []. Every rank must call it between backward and step.

    As in Megatron-LM each weight is counted once, and so are padding rows of the vocabulary, whose gradient is 0.
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
    """Load balance of a mixture of experts: means over micro-batches and ranks since the last logged iteration."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, module: nn.Module) -> None:
        self._layout, self._routers, self._model = layout, routers(module), run.model

    def metrics(self) -> Mapping[str, Tensor]:
        """Means over layers of the unweighted auxiliary losses, of the router's entropy and of dropped tokens; largest
        and smallest load of an expert, as a multiple of an equal share of the tokens of its layer."""
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
    """``loads`` [layers, E] by metric name; layers without experts are left out."""
    return {
        expert_load(layer, expert): load
        for layer, layer_loads in enumerate(loads, 1)
        if layer_loads.isfinite().all()
        for expert, load in enumerate(layer_loads)
    }


class ZerosInGradient(Callback):
    """``--log-num-zeros-in-grad``: the zeros in the gradient of the logged iteration."""

    def __init__(self, run: RunConfig, layout: ParallelLayout, module: nn.Module) -> None:
        self._run, self._layout, self._module = run, layout, module
        self._last_micro_batch = 0
        self._zeros: float | Tensor = 0

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Count the zeros before the optimizer step of a logged iteration."""
        self._last_micro_batch = self._run.train.micro_batches(iteration)
        yield [self._count] if self._run.is_logged(iteration) else ()

    def metrics(self) -> Mapping[str, float | Tensor]:
        """``num_zeros_in_grad``."""
        return {"num_zeros_in_grad": self._zeros}

    @contextmanager
    def _count(self, instruction: Instruction) -> Iterator[None]:
        # step() of DeepSpeedEngine is called after each micro-batch; only the last call updates the weights.
        if instruction.name == "OptimizerStep" and instruction.micro_batch in (None, self._last_micro_batch):
            self._zeros = zeros_in_gradient(self._module, self._layout)
        yield


_REST = "forward-backward"
"""The timer of the rest of an iteration, without the other timers of level 1."""
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
"""The timers that each level adds: DeepSpeed's name of the pipeline instruction to Megatron-LM's name of the timer."""


class PhaseTimers(Callback):
    """``--timing-log-level``: seconds per iteration in each phase, without the nested phases inside it."""

    def __init__(self, level: int) -> None:
        self._phases = {name: timer for number in range(1, level + 1) for name, timer in _PHASES[number].items()}
        self._seconds: dict[str, float] = defaultdict(float)
        self._iterations = 0
        self._inside = 0.0
        """Seconds of the phases nested in the current one."""

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Time the iteration."""
        begin, before = now(), self._sum_of_level_1()
        yield [self._time]
        self._seconds[_REST] += now() - begin - (self._sum_of_level_1() - before)
        self._iterations += 1

    def metrics(self) -> Mapping[str, float]:
        """``NAME-time`` of each timer: mean seconds per iteration since the last call, on the slowest rank.

        Prints the minimum and maximum over ranks, as Megatron-LM does. Every rank must call it.
        """
        timers = [_REST, *self._phases.values()]
        seconds = {name: self._seconds[name] / max(self._iterations, 1) for name in timers if name in self._seconds}
        own = torch.tensor([(seconds.get(name, -torch.inf), -seconds.get(name, torch.inf)) for name in timers])
        extremes = own.to(get_accelerator().current_device_name())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        pairs = zip(timers, extremes.tolist(), strict=True)
        ranges = {name: (-negated, longest) for name, (longest, negated) in pairs if longest > -torch.inf}
        self._seconds.clear()
        self._iterations = 0
        if dist.get_rank() == 0:
            print("(min, max) time across ranks (ms):")
            for name, (shortest, longest) in ranges.items():
                print(f"    {name + ' ':.<48}: ({shortest * 1000:.2f}, {longest * 1000:.2f})", flush=True)
        return {f"{name}{TIMER}": longest for name, (_, longest) in ranges.items()}

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
"""File in --save with the slow hosts of the last window, for ``tools/launch.py --exclude-stragglers``."""
_COMPUTING = ("ForwardPass", "BackwardPass", "BackwardInputPass", "BackwardWeightPass")


class RankTime(NamedTuple):
    """Compute time of a rank."""

    host: str
    stage: int
    seconds: float
    """Seconds in forward and backward passes per iteration."""
    cost: float
    """FLOPs of its stage, in any unit."""


def slow_hosts(times: Sequence[RankTime], share: float) -> dict[str, float]:
    """The hosts that are slower than the others by more than ``share`` for the same work, with their slowdown.

    A rank is compared with ranks of the same pipeline stage on other hosts; if there are none, with all ranks of other
    hosts, scaled by FLOPs. A host is as slow as the median of its ranks, since the ranks of a tensor-parallel group
    wait for each other.
    """
    slowdowns = defaultdict(list)
    for rank in times:
        others = [other for other in times if other.host != rank.host]
        same_stage = [other.seconds for other in others if other.stage == rank.stage]
        scaled = [other.seconds * rank.cost / other.cost for other in others if other.cost and rank.cost]
        if expected := statistics.median(same_stage or scaled or [0.0]):
            slowdowns[rank.host].append(rank.seconds / expected - 1)
    medians = {host: statistics.median(values) for host, values in slowdowns.items()}
    return {host: slowdown for host, slowdown in medians.items() if slowdown > share}


class StragglerReport(Callback):
    """``--straggler-report``: reports slow hosts at the first logged iteration after each window."""

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
        """``slow_hosts``, the number of slow hosts, once per window. Every rank must call it."""
        if self._iterations < self._window:
            return {}
        own = RankTime(socket.gethostname(), self._stage, self._seconds / self._iterations, self._cost)
        self._seconds, self._iterations = 0.0, 0
        return {"slow_hosts": gathered_on_rank_0(lambda: own, self._report)}

    def _report(self, times: Sequence[RankTime]) -> int:
        """Print the slow hosts and write them to a file for an elastic agent. Returns their number."""
        slow = slow_hosts(times, self._share)
        for host, share in slow.items():
            print(f"  warning: host {host} is slow: its ranks compute {share:.0%} longer than others", flush=True)
        if self._folder is not None:
            ranks = [rank for rank, time in enumerate(times) if time.host in slow]
            with warn_if_unwritable(STRAGGLERS):
                replace_text(self._folder / STRAGGLERS, json.dumps({"hosts": slow, "ranks": ranks}))
        return len(slow)


def now() -> float:
    """The time in seconds, after waiting for the device."""
    get_accelerator().synchronize()
    return time.perf_counter()
