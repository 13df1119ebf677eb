"""Anomaly detection: non-finite losses and gradients, loss spikes, and the layer where non-finite values begin."""

import math
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from megatron.checkpoint.collective_errors import gathered_on_rank_0
from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.engine import eval_batch
from megatron.engines.status import StepStatus
from megatron.model.transformer import HiddenStates, ParallelTransformerLayer, unpack

SPIKE_WINDOW = 20
"""Number of previous good steps whose mean loss a spike is compared with; without so many there is no spike."""


class StepResult(NamedTuple):
    """Whether a step was good, and if not, what is wrong."""

    problem: str | None
    """None for a good step."""
    first_iteration: int
    """First iteration of the consecutive bad steps that end with this one."""
    is_spike: bool = False
    """Whether the problem is a loss spike."""
    limit_reached: bool = False
    """Whether ``--max-consecutive-bad-steps`` steps in a row were bad."""


class AnomalyDetector:
    """Classifies steps by their loss and by whether the engine applied them."""

    def __init__(self, run: RunConfig):
        self._limit = run.train.max_consecutive_bad_steps
        self._spike_factor = run.train.spike_factor if run.train.rewind_on_spike else math.inf
        has_dynamic_scale = run.precision.fp16 and not run.precision.loss_scale
        self._min_scale = run.precision.min_scale if has_dynamic_scale else None
        self._bad_iterations: list[int] = []
        self._recent_losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def check(self, iteration: int, loss: float, status: StepStatus) -> StepResult:
        """Check ``iteration``. All ranks get the same result if ``loss`` and ``status`` are the same on all ranks."""
        # A skipped step that only lowers the dynamic loss scale of fp16 is normal above the smallest scale.
        scale_is_adjusted = self._min_scale is not None and status.loss_scale > self._min_scale
        if math.isfinite(loss) and (status.applied or scale_is_adjusted):
            return self._check_spike(iteration, loss)
        self._bad_iterations.append(iteration)
        quantity = "gradient norm" if math.isfinite(loss) else "loss"
        action = "the step was applied" if status.applied else "the step was skipped"
        limit_reached = len(self._bad_iterations) >= self._limit
        problem = f"the {quantity} is not finite, {action}"
        return StepResult(problem, self._bad_iterations[0], limit_reached=limit_reached)

    @property
    def weights_are_good(self) -> bool:
        """Whether the last step was good, so that the weights are worth saving."""
        return not self._bad_iterations

    def reset(self) -> None:
        """Forget all steps, after rewinding to a checkpoint."""
        self._bad_iterations.clear()
        self._recent_losses.clear()

    def _check_spike(self, iteration: int, loss: float) -> StepResult:
        self._bad_iterations.clear()
        is_full = len(self._recent_losses) == SPIKE_WINDOW  # a mean of fewer is too uncertain to rewind for
        mean = sum(self._recent_losses) / SPIKE_WINDOW if is_full else math.inf
        if loss > self._spike_factor * mean:
            return StepResult(f"the loss of {loss:.4g} is a spike over {mean:.4g}", iteration, is_spike=True)
        self._recent_losses.append(loss)
        return StepResult(None, iteration)


def max_across_ranks(loss: Tensor, *values: float) -> Tensor:
    """Maximum over all ranks of the loss and of each further value, [1 + values], in one all-reduce. Every rank must
    call it.

    A NaN loss on any rank becomes infinity. Ranks that should have the same loss may differ when something is broken;
    they must still take the same decisions.
    """
    largest_loss = loss.detach().float().nan_to_num(nan=torch.inf).view(1)
    numbers = torch.tensor(values, dtype=torch.float32)
    if not loss.is_cpu:  # a copy from pageable memory would wait for the GPU
        numbers = get_accelerator().pin_memory(numbers).to(loss.device, non_blocking=True)
    largest = torch.cat([largest_loss, numbers])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def find_origin(engine: DeepSpeedEngine, batches: Iterator[Batch] | None) -> str:
    """Describe in which layer non-finite values begin, by repeating the forward pass without dropout.

    Every rank must call it.
    """
    with _record_nonfinite_layers(engine.module) as bad_layers:
        loss = max_across_ranks(eval_batch(engine, batches)).item()
    return gathered_on_rank_0(lambda: min(bad_layers, default=None), partial(_describe_origin, loss))


def _describe_origin(loss: float, first_per_rank: list[tuple[int, str] | None]) -> str:
    bad_ranks = [(layer, rank) for rank, layer in enumerate(first_per_rank) if layer is not None]
    if bad_ranks:
        (_, name), _ = min(bad_ranks)
        ranks = [str(rank) for layer, rank in bad_ranks if layer[1] == name]
        return f"in a repeated forward pass it begins in {name} on rank {', '.join(ranks)}"
    if not math.isfinite(loss):
        return "in a repeated forward pass it begins in the loss"
    return "a repeated forward pass is finite: only gradients were not, or the problem was transient"


_EMBEDDING, _HEAD = (0, "the embedding"), (sys.maxsize, "the head")


@contextmanager
def _record_nonfinite_layers(module: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Yield a set that collects (number, name) of the layers whose output is not finite."""
    bad_layers: set[tuple[int, str]] = set()

    def add_hook(key: tuple[int, str], layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple, output: HiddenStates) -> None:
            if not bool(torch.isfinite(unpack(output)[0]).all()):
                # The embedding is called again as the head, with hidden states instead of tokens.
                is_head = key == _EMBEDDING and unpack(inputs[0])[0].is_floating_point()
                bad_layers.add(_HEAD if is_head else key)

        return layer.register_forward_hook(hook)

    handles = [add_hook(key, layer) for key, layer in _layers(module)]
    try:
        yield bad_layers
    finally:
        for handle in handles:
            handle.remove()


def _layers(module: nn.Module) -> Iterator[tuple[tuple[int, str], nn.Module]]:
    """This rank's embedding and transformer layers, each as ((number in the list of layers, readable name), layer)."""
    for name, layer in module.named_modules():
        last = name.rpartition(".")[2]
        if last == "embed":
            yield _EMBEDDING, layer
        elif isinstance(layer, ParallelTransformerLayer):
            yield (int(last), f"layer {layer.layer_number}"), layer
