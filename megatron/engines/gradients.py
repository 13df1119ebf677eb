"""Flat gradient buckets for ZeRO 1 and 2, reduced over the data-parallel ranks.

A bucket is a parameter group of the optimizer, whose flat weights DeepSpeed shards evenly over the data-parallel
ranks. Gradients have the same order, so that one reduce-scatter of the bucket gives every rank the gradient of its
shard without another copy. ``parameter_groups`` forms groups of a suitable size in the order of the layers. The
backward pass completes them from the last to the first, and each is reduced as soon as it is complete.

DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py copies each gradient into a bucket, reduces it to all ranks, and copies
this rank's part out of it; at ZeRO 1, and in a pipeline, after the backward pass.
Test: tests/engines/test_gradients.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work


class Reduction(NamedTuple):
    """A reduction that has been started."""

    work: Work | None
    """None with a single rank."""
    sent: Tensor
    received: Tensor


_MOST_KEPT = 1 << 24
"""Elements of gradients that are kept, to be added to the bucket by one kernel."""


class GradientBucket:
    """The gradients of one parameter group.

    Args:
        parameters: the parameters in the order of the flat weights.
        master: this rank's part of the flat weights in fp32, [part].
        group: the ranks that shard the flat weights.
        paddings: padding elements after each parameter in the flat weights; the rest follows after the last one.
        dtype: accumulation dtype of the gradients of micro-batches.
        sent_dtype: dtype of the reduction over ranks.
        divisor: divisor of the sum over ranks, which makes it a mean.
        divisor_before: divisor of the gradients before the reduction.
        scatters: whether gradients are reduce-scattered instead of all-reduced.
        is_sharded: ZeRO 2: the gradients of each micro-batch are reduced and freed; otherwise they stay in a buffer.
        is_last: whether gradients still change after the backward pass, so that they are reduced last.
        adds_together: whether one kernel adds several gradients to the buffer, instead of autograd one at a time.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        master: Tensor,
        group: ProcessGroup,
        *,
        paddings: Sequence[int] | None = None,
        dtype: torch.dtype,
        sent_dtype: torch.dtype,
        divisor: float,
        divisor_before: float = 1.0,
        scatters: bool = True,
        is_sharded: bool,
        is_last: bool,
        adds_together: bool = False,
    ):
        self.parameters, self.group, self.is_last = parameters, group, is_last
        self._part, self._sent_dtype, self._scatters = master.numel(), sent_dtype, scatters
        self.divisor, self._divisor_before = divisor, divisor_before
        sizes = [parameter.numel() for parameter in parameters]
        inner = list(paddings or [0] * len(sizes))[:-1]
        self._paddings = [*inner, self.gradient_elements - sum(sizes) - sum(inner)]
        self.sum_dtype = dtype if is_sharded else master.dtype
        self._arrived = 0
        self._kept: dict[int, Tensor] = {}
        self._kept_elements = 0
        self._added = 0
        self._started: Reduction | None = None
        self._flat: Tensor | None = None
        if not is_sharded:
            self._flat = torch.zeros(self.gradient_elements, dtype=dtype, device=master.device)
            self._views = self._views_of(self._flat)
            is_other_dtype = dtype != parameters[0].dtype
            self._adds = is_other_dtype or adds_together
            self._most_kept = 0 if is_other_dtype else _MOST_KEPT

    def _views_of(self, flat: Tensor) -> Sequence[Tensor]:
        """Views of the elements of each parameter in ``flat``."""
        sizes = map(nn.Parameter.numel, self.parameters)
        return flat.split(list(chain(*zip(sizes, self._paddings, strict=True))))[::2]

    def begin_step(self) -> None:
        """Set the gradients to zero."""
        if self._flat is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        self._added = 0
        self._flat.zero_()
        if not self._adds:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view.view_as(parameter)

    def add(self, number: int, parameter: nn.Parameter) -> None:
        """Accumulate ``parameter.grad`` into the bucket, unless autograd does. A backward pass leaves nothing kept."""
        if self._flat is None or not self._adds or parameter.grad is None:
            return
        if number in self._kept:
            self._add_kept()
        self._kept[number] = parameter.grad.flatten()
        self._kept_elements += parameter.numel()
        parameter.grad = None
        self._added += 1
        is_pass_complete = self._added % len(self.parameters) == 0
        if is_pass_complete or self._kept_elements >= self._most_kept:
            self._add_kept()

    def _add_kept(self) -> None:
        if self._kept:
            torch._foreach_add_([self._views[number] for number in self._kept], [*self._kept.values()])
            self._kept.clear()
            self._kept_elements = 0

    def count(self, passes: int) -> bool:
        """Count a gradient. Returns whether it completes the bucket: one gradient per parameter and pass."""
        assert self._started is None, "a gradient arrives after its bucket was reduced"
        self._arrived += 1
        return self._arrived == passes * len(self.parameters)

    def view(self, parameter: nn.Parameter) -> Tensor | None:
        """The view of the gradient of ``parameter``; None if it is not in this bucket."""
        self._add_kept()
        views = zip(self.parameters, self._views, strict=True)
        return next((view for candidate, view in views if candidate is parameter), None)

    def start(self) -> None:
        """Start the reduction of the gradients."""
        self._add_kept()
        sent = self._gathered() if self._flat is None else self._flat.to(self._sent_dtype)
        if self._divisor_before != 1:
            sent.div_(self._divisor_before)
        work, received = None, sent
        if self._scatters and self.group.size() > 1:
            received = torch.empty(self._part, dtype=sent.dtype, device=sent.device)
            work = dist.reduce_scatter_tensor(received, sent, group=self.group, async_op=True)
        elif self.group.size() > 1:
            received = sent.split(self._part)[self.group.rank()]
            work = dist.all_reduce(sent, group=self.group, async_op=True)
        self._started = Reduction(work, sent, received)

    def _gathered(self) -> Tensor:
        """Move the gradients of a micro-batch from the parameters into one flat tensor."""
        arrived = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        is_full = len(arrived) == len(self.parameters) and not any(self._paddings)
        new = torch.empty if is_full else torch.zeros
        flat = new(self.gradient_elements, dtype=self._sent_dtype, device=self.parameters[0].device)
        views = self._views_of(flat)
        gradients = [self.parameters[number].grad.flatten() for number in arrived]  # type: ignore[union-attr]
        torch._foreach_copy_([views[number] for number in arrived], gradients)
        for parameter in self.parameters:
            parameter.grad = None
        return flat

    def finish(self) -> Tensor:
        """Wait for the reduction. Returns this rank's part of the sum, [part], which the caller owns."""
        assert self._started is not None
        if self._started.work is not None:
            self._started.work.wait()
        received, self._started, self._arrived = self._started.received, None, 0
        if self._flat is None and not self._scatters:
            received = received.clone()  # so that the memory of the other ranks' parts is freed
        for parameter in self.parameters:
            parameter.grad = None
        return received

    @property
    def gradient_elements(self) -> int:
        """Elements of the flat gradients of all ranks."""
        return self._part * self.group.size()


class Gradients:
    """All gradient buckets of an optimizer, reduced in the same order on all ranks.

    ``passes`` returns the number of backward passes between reductions. A bucket in which each parameter has got that
    many gradients is reduced immediately, regardless of the schedule; without ``passes`` all buckets are reduced in
    ``reduce``. ``first_uses`` is the position in the model of each bucket's first parameter, whose gradient completes
    the bucket: the bucket of all norms and biases is complete last.
    """

    def __init__(self, buckets: Sequence[GradientBucket], passes: Callable[[], int] | None, first_uses: Sequence[int]):
        self._buckets, self._passes = buckets, passes
        uses = dict(zip(buckets, first_uses, strict=True))
        self._in_order = sorted(buckets, key=lambda bucket: (bucket.is_last, -uses[bucket]))
        self._complete: set[GradientBucket] = set()
        self.parts: list[Tensor] = []
        """This rank's part of the gradient of each bucket, [part]."""
        self.number_started = 0
        for bucket in buckets:
            for number, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, number))
        self.begin_step()

    def begin_step(self) -> None:
        """Set all gradients to zero."""
        self.parts = []
        for bucket in self._buckets:
            bucket.begin_step()

    def _on_gradient(self, bucket: GradientBucket, number: int, parameter: nn.Parameter) -> None:
        bucket.add(number, parameter)
        if self._passes is None or bucket.is_last or not bucket.count(self._passes()):
            return
        self._complete.add(bucket)
        while self.number_started < len(self._in_order) and self._in_order[self.number_started] in self._complete:
            self._start_next()

    def _start_next(self) -> None:
        self._in_order[self.number_started].start()
        self.number_started += 1

    def reduce(self) -> None:
        """Reduce the remaining buckets, wait for all, and add the means to this rank's parts."""
        while self.number_started < len(self._in_order):
            self._start_next()
        first = self._buckets[0]
        means = in_type([bucket.finish() for bucket in self._buckets], first.sum_dtype)
        if first.divisor != 1:
            torch._foreach_div_(means, first.divisor)
        if self.parts:
            torch._foreach_add_(self.parts, means)
        else:
            self.parts = means
        self.number_started = 0
        self._complete.clear()

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The unreduced gradient of ``parameter`` on this rank; ZeRO 1 only."""
        return next(filter(lambda view: view is not None, (bucket.view(parameter) for bucket in self._buckets)), None)


def in_type(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """``tensors`` converted to ``dtype`` with one fused copy, if necessary."""
    if tensors[0].dtype == dtype:
        return tensors
    converted = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(converted, tensors)
    return converted


def sum_together(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum ``tensors`` over the ranks of ``group`` in place, with a single all-reduce."""
    if tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        sums = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), sums)
