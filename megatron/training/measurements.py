"""What a run measures on request: norm of the parameters, zeros in the gradient, the use of experts, and times."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.engines.gradient_norm import block_norms, counted_once, sum_over_model
from megatron.model.router import routers
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.training.callbacks import Callback
from megatron.training.metrics import expert_load
from megatron.training.timers import PhaseTimers, StragglerReport


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
