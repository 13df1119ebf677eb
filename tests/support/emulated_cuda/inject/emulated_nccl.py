"""The backend ``nccl`` over gloo: in the memory that tensors of an emulated device have, or in copies on the host.

With copies several ranks can share one real GPU, which NCCL refuses. What NCCL refuses otherwise is refused here, too:
tensors of the host, and tensors with gaps.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

BACKEND = "emulated_nccl"
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "allgather_coalesced", "_allgather_base",
    "all_gather_single", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "alltoall",
    "alltoall_base", "all_to_all_single", "reduce", "gather", "scatter", "send", "recv", "recv_anysource",
)  # fmt: skip


RECEIVING = ("recv", "recv_anysource")


class Finished(dist.Work):
    """Of operations that have ended."""

    def wait(self, timeout: Any = None) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


class Copied(dist.Work):
    """Of an operation on copies in host memory; they are kept until it has ended, and then copied to ``results``."""

    def __init__(self, work: dist.Work, copies: Any, results: Any):
        super().__init__()
        self._work, self._copies, self._results = work, copies, results

    def wait(self, timeout: Any = None) -> bool:
        """Until the results are on the device."""
        if self._copies is not None:
            self._work.wait()
            with torch.no_grad():
                for result, copy in zip(tree_leaves(self._results), tree_leaves(self._copies), strict=False):
                    result.copy_(copy)
            self._copies = None
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._copies is None


class EmulatedNccl(dist.ProcessGroup):
    """A process group for tensors of the device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    @property
    def _device_types(self) -> list[torch.device]:
        """Where torch puts objects that it sends."""
        return [torch.device("cuda")]

    @property
    def group_name(self) -> str:
        """Its name in torch's registry."""
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(supports_splitting=False, name=self.getBackendName)

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """As NCCL's."""
        return "nccl"

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        return self._gloo.barrier()

    def _start_coalescing(self, device: torch.device) -> None: ...

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return Finished()

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """One after the other."""
        return self._each(("all_gather_single", "_allgather_base"), outputs, inputs)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """One after the other."""
        return self._each(("reduce_scatter_single", "_reduce_scatter_base"), outputs, inputs)

    def _each(self, names: tuple[str, str], outputs: Any, inputs: Any) -> dist.Work:
        name = next(name for name in names if hasattr(dist.ProcessGroup, name))
        for output, part in zip(outputs, inputs, strict=True):
            getattr(self, name)(output, part).wait()
        return Finished()


def _on_cpu(value: Any, *, copied: bool = False) -> Any:
    """A tensor of the device as one of the CPU, in the same memory or as a copy; raises what NCCL's backend does."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_cuda:
        raise RuntimeError("No backend type associated with device type cpu")
    if not value.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return value.detach().cpu() if copied else torch.ops.emulated_cuda.on_cpu(value)


def _over_gloo(name: str) -> Callable[..., dist.Work]:
    def collective(self: EmulatedNccl, *arguments: Any, **options: Any) -> dist.Work:
        return getattr(self._gloo, name)(*tree_map(_on_cpu, list(arguments)), **tree_map(_on_cpu, options))

    return collective


def _by_copies(name: str) -> Callable[..., dist.Work]:
    """The same on copies in host memory. What a collective writes is its first argument; a rank that sends does not
    wait for the one that receives."""

    def collective(self: EmulatedNccl, *arguments: Any, **options: Any) -> dist.Work:
        copies = tree_map(partial(_on_cpu, copied=True), list(arguments))
        work = Copied(getattr(self._gloo, name)(*copies, **options), copies, [] if name == "send" else arguments[0])
        if name not in ("send", *RECEIVING):
            work.wait()
        return work

    return collective


def install(*, copies: bool) -> None:
    """Register the backend, and let whoever asks for NCCL have it."""
    for name in COLLECTIVES:
        if hasattr(dist.ProcessGroup, name):
            setattr(EmulatedNccl, name, (_by_copies if copies else _over_gloo)(name))
    dist.Backend.register_backend(BACKEND, EmulatedNccl, devices=["cuda"])
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *arguments: Any, device_id: Any = None, **options: Any) -> None:
        init({"nccl": BACKEND}.get(backend or "nccl", backend), *arguments, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
