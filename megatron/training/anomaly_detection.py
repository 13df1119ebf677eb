"""Steps whose numbers went wrong: told from the others, counted, and traced to the layer where they begin."""

import math
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.model.transformer import HiddenStates, ParallelTransformerLayer, unpack
from megatron.training.engines import StepStatus, eval_batch

SPIKE_WINDOW = 20
"""Good steps that a spike stands out from."""


class Verdict(NamedTuple):
    """What a step came to."""

    fault: str | None
    """In words; None for a good step."""
    since: int
    """First iteration of the faults in a row of which this is the last."""
    is_spike: bool = False
    """Whether the fault is the height of the loss."""
    is_last_straw: bool = False
    """Whether so many in a row went wrong that training cannot go on as it is."""


class StepWatch:
    """Tells good steps from bad ones by their loss and by whether the engine made them."""

    def __init__(self, run: RunConfig):
        self._limit = run.train.max_consecutive_bad_steps
        self._spike_factor = run.train.spike_factor if run.train.rewind_on_spike else math.inf
        self._scale_that_moves = (
            run.precision.min_scale if run.precision.fp16 and not run.precision.loss_scale else None
        )
        self._bad: list[int] = []
        self._recent: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def judge(self, iteration: int, loss: float, status: StepStatus) -> Verdict:
        """What iteration ``iteration`` came to: alike on every rank if ``loss`` is, for ``status`` is."""
        if math.isfinite(loss) and (status.applied or self._finds_its_scale(status)):
            return self._judge_height(iteration, loss)
        self._bad.append(iteration)
        what = "gradient norm" if math.isfinite(loss) else "loss"
        made = "the step was made" if status.applied else "the step was skipped"
        is_last_straw = len(self._bad) >= self._limit
        return Verdict(f"the {what} is not finite, {made}", self._bad[0], is_last_straw=is_last_straw)

    @property
    def trusts_weights(self) -> bool:
        """Whether the last step was a good one, so that the weights are worth keeping."""
        return not self._bad

    def forget(self) -> None:
        """Begin anew, behind a return to a checkpoint."""
        self._bad.clear()
        self._recent.clear()

    def _judge_height(self, iteration: int, loss: float) -> Verdict:
        self._bad.clear()
        mean = sum(self._recent) / len(self._recent) if self._recent else math.inf
        if loss > self._spike_factor * mean:
            return Verdict(f"the loss of {loss:.4g} is a spike over {mean:.4g}", iteration, is_spike=True)
        self._recent.append(loss)
        return Verdict(None, iteration)

    def _finds_its_scale(self, status: StepStatus) -> bool:
        """Whether fp16's loss scale still has somewhere to go: then an overflow is how it finds its place."""
        return self._scale_that_moves is not None and status.loss_scale > self._scale_that_moves


def agreed(loss: Tensor) -> float:
    """The largest over all ranks, infinite where it is no number on any. Every rank must call it.

    Ranks that should have the same loss may differ where something is broken, and must not part ways over it.
    """
    largest = loss.detach().float().nan_to_num(nan=torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def find_origin(engine: DeepSpeedEngine, batches: Iterator[Batch] | None) -> str:
    """Where in the model numbers that are not finite begin, in words. Every rank must call it.

    Runs the batch once more, forward only and without dropout.
    """
    with _watched(engine.module) as seen:
        loss = agreed(eval_batch(engine, batches))
    everyone: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, min(seen, default=None))
    found = [(place, rank) for rank, place in enumerate(everyone) if place is not None]
    if found:
        (_, name), _ = min(found)
        ranks = [str(rank) for place, rank in found if place[1] == name]
        return f"once more it begins in {name} on rank {', '.join(ranks)}"
    if not math.isfinite(loss):
        return "once more it begins in the loss"
    return "a second forward pass is finite: it was in the gradients alone, or has passed"


_EMBEDDING, _HEAD = (0, "the embedding"), (sys.maxsize, "the head")


@contextmanager
def _watched(module: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """The places, (number, name), of the layers that give what is not finite."""
    seen: set[tuple[int, str]] = set()

    def watch(place: tuple[int, str], layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def look(_: nn.Module, inputs: tuple, output: HiddenStates) -> None:
            if not _is_finite(unpack(output)[0]):
                # The embedding is called once more, with hidden states instead of tokens, as the head.
                seen.add(_HEAD if place == _EMBEDDING and unpack(inputs[0])[0].is_floating_point() else place)

        return layer.register_forward_hook(look)

    handles = [watch(place, layer) for place, layer in _layers(module)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _layers(module: nn.Module) -> Iterator[tuple[tuple[int, str], nn.Module]]:
    """This rank's layers by their number in the list of layers, and a name that says what each is."""
    for name, layer in module.named_modules():
        last = name.rpartition(".")[2]
        if last == "embed":
            yield _EMBEDDING, layer
        elif isinstance(layer, ParallelTransformerLayer):
            yield (int(last), f"layer {layer.layer_number}"), layer


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
