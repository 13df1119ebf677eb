"""The gradients of ZeRO 1 and 2 in flat buckets, reduced over the data-parallel ranks; the norm of all gradients.

A bucket is a parameter group of the optimizer, whose flat weights DeepSpeed divides evenly over the data-parallel
ranks. The gradients lie in the same order, so that one reduce-scatter of the bucket gives every rank the gradient of
its part, without another copy. ``parameter_groups`` makes groups of a suitable size, in the order of the layers. The
backward pass completes them from the last to the first, and each is reduced as soon as it is complete.

DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py copies each gradient into a bucket, reduces it to all ranks, and copies
what this rank needs out of it; at ZeRO 1, and in a pipeline, after the backward pass.
Test: tests/engines/test_gradients.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from megatron.parallel.layout import ParallelLayout


class Reduction(NamedTuple):
    """A reduce-scatter that has been started."""

    work: Work | None
    """None with one rank."""
    sent: Tensor
    received: Tensor


class GradientBucket:
    """The gradients of one parameter group.

    Args:
        parameters: in the order of the flat weights.
        master: this rank's part of the flat weights in fp32, [part].
        group: the ranks that divide the flat weights.
        dtype: in which the gradients of micro-batches are added up.
        sent_dtype: in which ranks add them up.
        divisor: of the sum over the ranks, which makes it a mean.
        is_sharded: ZeRO 2. Each micro-batch's gradients are reduced and freed; else they stay in a buffer of their own.
        is_last: whether something else changes the gradients after the backward pass, so that they are reduced last.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        master: Tensor,
        group: ProcessGroup,
        *,
        dtype: torch.dtype,
        sent_dtype: torch.dtype,
        divisor: float,
        is_sharded: bool,
        is_last: bool,
    ):
        self.parameters, self.group, self.is_last = parameters, group, is_last
        self._part, self._sent_dtype, self._divisor = master.numel(), sent_dtype, divisor
        self._sum_dtype = dtype if is_sharded else master.dtype
        self._arrived = 0
        self._started: Reduction | None = None
        self._gradient: Tensor | None = None
        self._flat: Tensor | None = None
        if not is_sharded:
            self._flat = torch.zeros(self._part * group.size(), dtype=dtype, device=master.device)
            self._views = self._flat.split([*map(nn.Parameter.numel, parameters), self._padding])[:-1]
            self._adds = dtype != parameters[0].dtype

    @property
    def _padding(self) -> int:
        return self._part * self.group.size() - sum(parameter.numel() for parameter in self.parameters)

    def begin_step(self) -> None:
        """Set the gradients to zero."""
        self._gradient = None
        if self._flat is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        self._flat.zero_()
        if not self._adds:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view.view_as(parameter)

    def add(self, number: int, parameter: nn.Parameter) -> None:
        """Add the gradient that a backward pass has left in ``parameter`` in another type than the bucket's."""
        if self._flat is not None and self._adds and parameter.grad is not None:
            self._views[number].add_(parameter.grad.flatten())
            parameter.grad = None

    def has_all(self, passes: int) -> bool:
        """Count a gradient; whether it was the last one, if each parameter gets one in each of the ``passes``."""
        assert self._started is None, "a gradient arrives after its bucket was reduced"
        self._arrived += 1
        return self._arrived == passes * len(self.parameters)

    def view(self, parameter: nn.Parameter) -> Tensor | None:
        """Where the gradient of ``parameter`` is added up; None if it is not in this bucket."""
        return next((view for one, view in zip(self.parameters, self._views, strict=True) if one is parameter), None)

    def start(self) -> None:
        """Start to reduce the gradients."""
        flat = self._gathered() if self._flat is None else self._flat
        sent = flat.to(self._sent_dtype)
        if self.group.size() == 1:
            self._started = Reduction(None, sent, sent)
            return
        received = torch.empty(self._part, dtype=sent.dtype, device=sent.device)
        work = dist.reduce_scatter_tensor(received, sent, group=self.group, async_op=True)
        self._started = Reduction(work, sent, received)

    def _gathered(self) -> Tensor:
        """The gradients of a micro-batch, which leave the parameters, in one flat tensor."""
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return torch.cat([*parts, parts[0].new_zeros(self._padding)])

    def finish(self) -> None:
        """Wait for the reduction, and add its result to this rank's part of the gradient."""
        assert self._started is not None
        if self._started.work is not None:
            self._started.work.wait()
        mean = self._started.received.to(self._sum_dtype)
        if self._divisor != 1:
            mean.div_(self._divisor)  # of no further use elsewhere
        self._gradient = mean if self._gradient is None else self._gradient.add_(mean)
        self._started, self._arrived = None, 0
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def gradient_elements(self) -> int:
        """Of the flat gradients of all ranks' parts."""
        return self._part * self.group.size()

    @property
    def gradient(self) -> Tensor:
        """This rank's part of the gradient of a step, [part]."""
        assert self._gradient is not None
        return self._gradient


class Gradients:
    """The buckets of an optimizer, which are reduced in the same order on all ranks.

    ``passes`` returns the backward passes from one reduction to the next. A bucket in which each parameter has got that
    many gradients is reduced at once, whatever the schedule; without it all are reduced by ``reduce``. ``first_uses``
    has the position in the model of each bucket's first parameter, whose gradient completes it: the bucket of all norms
    and biases is complete last.
    """

    def __init__(self, buckets: Sequence[GradientBucket], passes: Callable[[], int] | None, first_uses: Sequence[int]):
        self._buckets, self._passes = buckets, passes
        uses = dict(zip(buckets, first_uses, strict=True))
        self._in_order = sorted(buckets, key=lambda bucket: (bucket.is_last, -uses[bucket]))
        self._complete: set[GradientBucket] = set()
        self.number_started = 0
        for bucket in buckets:
            for number, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, number))
        self.begin_step()

    def begin_step(self) -> None:
        """Set all gradients to zero."""
        for bucket in self._buckets:
            bucket.begin_step()

    def _on_gradient(self, bucket: GradientBucket, number: int, parameter: nn.Parameter) -> None:
        bucket.add(number, parameter)
        if self._passes is None or bucket.is_last or not bucket.has_all(self._passes()):
            return
        self._complete.add(bucket)
        while self.number_started < len(self._in_order) and self._in_order[self.number_started] in self._complete:
            self._start_next()

    def _start_next(self) -> None:
        self._in_order[self.number_started].start()
        self.number_started += 1

    def reduce(self) -> None:
        """Reduce the buckets that have not been, and wait for all."""
        while self.number_started < len(self._in_order):
            self._start_next()
        for bucket in self._in_order:
            bucket.finish()
        self.number_started = 0
        self._complete.clear()

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of ``parameter`` on this rank, before it is reduced; ZeRO 1."""
        return next(filter(lambda view: view is not None, (bucket.view(parameter) for bucket in self._buckets)), None)

    @property
    def parts(self) -> list[Tensor]:
        """This rank's part of the gradient of each group, [part]."""
        return [bucket.gradient for bucket in self._buckets]


def sum_together(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum each of ``tensors`` over the ranks of ``group``, all of them in one all-reduce."""
    if tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])


def gradient_norm(parameters: list[nn.Parameter], layout: ParallelLayout) -> Tensor:
    """2-norm of the gradient of the whole model, each weight counted once, on every rank."""
    device = parameters[0].device
    norms: list[list[Tensor]] = [[torch.zeros(1, device=device)], [torch.zeros(1, device=device)]]
    for parameter in counted_once(parameters, layout):
        if parameter.grad is not None:
            norms[is_moe_param(parameter)].append(block_norms(parameter.grad))
    return sum_over_model(torch.stack([torch.cat(some).square().sum() for some in norms]), layout).sqrt()


def sum_over_model(values: Tensor, layout: ParallelLayout) -> Tensor:
    """The sum [] over the ranks that share a replica of the model, on every rank.

    ``values`` [2] are sums over this rank's parameters that are ``counted_once``: of those that all ranks of an expert
    group hold, and of the experts that are divided over them.
    """
    if layout.expert_group is not None:
        dist.all_reduce(values[1], group=layout.expert_group)
    total = values.sum()
    for group in (layout.tensor_group, layout.pipe_group):
        if group.size() > 1:  # with itself, a rank would wait for the thread that communicates
            dist.all_reduce(total, group=group)
    return total


def counted_once(parameters: Iterable[nn.Parameter], layout: ParallelLayout) -> Iterator[nn.Parameter]:
    """The parameters that this rank contributes to a sum over the tensor-parallel ranks and the stages."""
    for parameter in parameters:
        is_replica = getattr(parameter, "ds_pipe_replicated", False)  # the first stage that holds a tied weight has it
        if not is_replica and (is_model_parallel_parameter(parameter) or layout.tensor_group.rank() == 0):
            yield parameter


_BLOCK = 1 << 16
"""Elements of a block, few enough for an accurate sum of squares in fp32."""
_BLOCKS = 16
"""Blocks that are converted together, and fit a core's cache."""


def block_norms(tensor: Tensor) -> Tensor:
    """2-norms in fp32 of blocks of ``tensor``. The norm of the result is the norm of the tensor.

    torch on CPU adds squares in fp32 one by one: for 40 million elements the third digit of the norm is wrong.
    """
    if tensor.device.type != "cpu" or tensor.numel() < _BLOCK:  # other devices add in a tree
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).view(1)
    flat, in_blocks = tensor.flatten(), tensor.numel() // _BLOCK * _BLOCK
    blocks = flat[:in_blocks].view(-1, _BLOCK).split(_BLOCKS)
    norms = [torch.linalg.vector_norm(some.float(), dim=1) for some in blocks]
    return torch.cat([*norms, torch.linalg.vector_norm(flat[in_blocks:].float()).view(1)])
