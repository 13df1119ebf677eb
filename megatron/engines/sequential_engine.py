"""``SequentialEngine``: the engine without pipeline stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.data.loader import Batch
from megatron.engines.containers import loss_parts
from megatron.engines.engine import Engine
from megatron.engines.overrides import overrides
from megatron.engines.zero import BucketedZeroOptimizer
from megatron.parallel.pipeline.schedule import Instruction


class SequentialEngine(Engine):
    """The engine without pipeline stages, for any ZeRO stage; same ``train_batch`` and ``eval_batch`` as a pipeline."""

    def __init__(self, *arguments: Any, **options: Any):
        self.mean_loss_parts = {}
        self._reduces = False
        """Whether all backward passes of a step have run, so that leaving ``coalesce_grad_reduction`` may reduce."""
        super().__init__(*arguments, **options)

    def train_batch(self, batches: Iterator[Batch]) -> Tensor:
        """Run one optimizer step over a global batch. Returns its loss [], the same on every rank."""
        if not self.module.training:  # train() visits all modules
            self.train()
        numbers = range(1, self.gradient_accumulation_steps() + 1)
        losses = []
        if self._run.coalesces_grad_reduction:
            with self._reduced_once():
                losses = [self._forward_and_backward(batches, number) for number in numbers]
            self._end_micro_batch(numbers[-1])
        else:
            for number in numbers:
                losses.append(self._forward_and_backward(batches, number))
                self._end_micro_batch(number)
        loss, *parts = self._mean_over_ranks(losses)
        self.mean_loss_parts = dict(zip(loss_parts(self.module), parts, strict=True))
        if self.global_rank == 0 and self.monitor.enabled:  # DeepSpeed does so with a pipeline only
            self.monitor.write_events([("Train/Samples/train_loss", loss.item(), self.global_samples)])
        return loss

    def eval_batch(self, batches: Iterator[Batch]) -> Tensor:
        """The loss [] of a global batch, the same on every rank, without an optimizer step."""
        self.eval()
        losses = [self._loss(next(batches)).view(1) for _ in range(self.gradient_accumulation_steps())]
        return self._mean_over_ranks(losses)[0]

    def _forward_and_backward(self, batches: Iterator[Batch], number: int) -> Tensor:
        """Run forward and backward of a micro-batch. Returns its loss and the loss terms, [1 + terms]."""
        with self.inside_hooks(Instruction("LoadMicroBatch", number)):
            batch = next(batches)
        with self.inside_hooks(Instruction("ForwardPass", number)):
            loss = self._loss(batch)
        with self.inside_hooks(Instruction("BackwardPass", number)):
            self.backward(loss)
        return torch.stack([loss.detach(), *loss_parts(self.module).values()])

    def _end_micro_batch(self, number: int) -> None:
        with self.inside_hooks(Instruction("OptimizerStep", number)):
            self.step()

    def _loss(self, batch: Batch) -> Tensor:
        return self(*self.moved(batch))

    def _mean_over_ranks(self, losses: list[Tensor]) -> Tensor:
        """The mean over micro-batches and ranks of each loss term, [n], with one all-reduce."""
        mean = torch.stack(losses).mean(dim=0)
        if self._data_group.size() > 1:
            dist.all_reduce(mean, group=self._data_group)
        return mean / self._data_group.size()

    @contextmanager
    def _reduced_once(self) -> Iterator[None]:
        """Context for ZeRO 2 and 3 in which backward passes accumulate gradients locally; leaving it reduces them.

        DeepSpeed also reduces after an error, when other ranks may be gone, and counts micro-batches only in ``step``,
        which must not be called inside. Test: tests/training/test_layouts_agree.py.
        """
        self._reduces = False
        with self.coalesce_grad_reduction():
            yield
            self._reduces = True
        self.micro_steps += self.gradient_accumulation_steps() - 1

    @overrides(DeepSpeedEngine, "(self, optimizer)")
    def _flush_coalesced_reduction_zero12(self, optimizer: Any) -> None:
        if self._reduces:
            with self.inside_hooks(Instruction("ReduceGrads")):
                if isinstance(optimizer, BucketedZeroOptimizer):
                    optimizer.reduce_gradients()
                else:
                    super()._flush_coalesced_reduction_zero12(optimizer)

    @overrides(DeepSpeedEngine, "(self, optimizer)")
    def _flush_coalesced_reduction_zero3(self, optimizer: Any) -> None:
        if self._reduces:
            with self.inside_hooks(Instruction("ReduceGrads")):
                super()._flush_coalesced_reduction_zero3(optimizer)

    @overrides(DeepSpeedEngine, "(*args, **kwargs)")
    def allreduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Reduce the gradients of a step."""
        with self.inside_hooks(Instruction("ReduceGrads")):
            super().allreduce_gradients(*arguments, **options)
