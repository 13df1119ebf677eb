"""Counts the kernels, copies and collectives of an iteration, and the synchronizations of the host with the device."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.parallel.pipeline.schedule import Instruction
from megatron.tools.one_rank.data_dependent import has_data_dependent_shape
from megatron.tools.one_rank.group import Operation

aten = torch.ops.aten
WITHOUT_KERNEL = frozenset(
    "view _unsafe_view t transpose expand slice select detach alias as_strided permute unsqueeze squeeze split unbind"
    " empty empty_like new_empty empty_strided new_empty_strided reshape narrow chunk split_with_sizes lift_fresh"
    " _reshape_alias unfold diagonal record_stream set_ resize_ is_nonzero _local_scalar_dense view_as_real"
    " view_as_complex _conj is_pinned _to_cpu sym_size sym_stride sym_numel".split()
)
"""Operations that launch no kernel."""
READ_BY_HOST = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)
"""Operations whose result the host reads; operations with a data-dependent shape also synchronize."""
COPIES = frozenset("copy_ _to_copy clone cat _foreach_copy_ contiguous _pin_memory".split())


class Communication(NamedTuple):
    """Properties of a collective or transfer; equal ones are counted together."""

    phase: str
    """DeepSpeed's name of the pipeline instruction; empty outside of instructions."""
    kind: str
    """torch's name of the operation, such as ``allreduce_``."""
    size: int
    """Bytes of the tensor of one rank; for gathers and scatters bytes of all ranks."""
    ranks: int
    """Size of the group."""
    span: int
    """Largest minus smallest rank of the group, plus 1."""
    is_overlapped: bool
    """Whether kernels are launched before the program waits for it."""


class Issued(NamedTuple):
    """A collective or transfer, and the number of kernels launched before it."""

    communication: Communication
    kernels: int


@dataclass
class Operations:
    """Counts of an iteration."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Operations that launch a kernel, by phase."""
    copies: Counter[str] = field(default_factory=Counter)
    """The ``kernels`` that only copy, by phase."""
    copied_bytes: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    """Synchronizations of the host with the device, by phase."""
    communication: Counter[Communication] = field(default_factory=Counter)
    phase: str = ""
    """DeepSpeed's name of the current pipeline instruction; empty outside of instructions."""
    is_counted: bool = False
    """Whether the current iteration is counted."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of all tensors of collectives and transfers."""
        return sum(communication.size * count for communication, count in self.communication.items())

    def issued(self, operation: Operation) -> Issued | None:
        """Count a collective or transfer."""
        size = max(sum(map(_bytes, operation.written)), sum(map(_bytes, operation.read)))
        if not self.is_counted or not size:
            return None
        group, ranks = operation.group, operation.group.ranks
        span = max(ranks) - min(ranks) + 1
        if operation.peer is not None and operation.kind in ("send", "recv"):
            span = abs(ranks[operation.peer] - ranks[group.rank()]) + 1
        communication = Communication(self.phase, operation.kind, size, len(ranks), span, False)
        self.communication[communication] += 1
        return Issued(communication, self.kernels.total())

    def waited(self, issued: Issued | None) -> None:
        """Count communication as overlapped if kernels were launched since it was ``issued``."""
        if issued is not None and (self.kernels.total() > issued.kernels or not self.is_counted):
            self.communication[issued.communication] -= 1
            self.communication[issued.communication._replace(is_overlapped=True)] += 1

    def grouped(self, parts: Sequence[tuple[int, ...]], group: Any) -> None:
        """Ignore the creation of groups."""


class Counts(TorchDispatchMode):
    """Dispatch mode that counts operations, including those of autograd's threads."""

    def __init__(self, operations: Operations):
        super().__init__()
        self._operations = operations
        self.is_paused = False

    @contextmanager
    def hook(self, instruction: Instruction) -> Iterator[None]:
        """Count operations inside under the name of ``instruction``."""
        enclosing, self._operations.phase = self._operations.phase, instruction.name
        yield
        self._operations.phase = enclosing

    def __enter__(self) -> "Counts":
        self._operations.is_counted = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._operations.is_counted = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if namespace != "prim" and not self.is_paused:
            self._count(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, name: str, args: tuple, kwargs: dict) -> None:
        counts, tensors = self._operations, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if waits(func, args, kwargs, tensors):
            counts.waits[counts.phase] += 1
        if name in WITHOUT_KERNEL or not (tensors or name in ("zeros", "full", "arange")):
            return
        counts.kernels[counts.phase] += 1
        if name in COPIES:
            counts.copies[counts.phase] += 1
            counts.copied_bytes += sum(map(_bytes, tensors))


def waits(func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> bool:
    """Whether the host waits for a GPU in this operation."""
    if func is aten._to_copy.default and "device" in kwargs:
        is_moved = (torch.device(kwargs["device"]).type == "cuda") != args[0].is_cuda
        return is_moved and not kwargs.get("non_blocking", False)
    if not any(tensor.is_cuda for tensor in tensors):
        return False
    if func in READ_BY_HOST or has_data_dependent_shape(func, args):
        return True
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
        return not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    return False


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
