"""One rank of a larger run on a GPU that computes nothing, and where its host would wait for it.

    WORLD_SIZE=4 RANK=3 LOCAL_RANK=3 python lint.py REPORT FLAGS...

trains as ``pretrain_gpt2.py FLAGS`` does, on the emulated device with torch's FakeTensor on it and its fake process
group: shapes, types and devices of every operation and collective are checked, also of models that no memory would
hold. Raises RuntimeError for an operation over two devices, and for a host tensor in a collective. ``REPORT`` becomes a
JSON list with the synchronizations of each iteration, those of the start first: ``{"FILE:LINE FUNCTION: SOURCE":
times}``. The first iteration has one more, which is planted here.
"""

import json
import linecache
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from megatron.tools.rehearsal.fake import DATA_DEPENDENT, all_of, apply_in_place, indexes_by_mask  # noqa: E402

aten = torch.ops.aten
ANSWERS = {
    aten._local_scalar_dense.default: lambda x: 1.0 if x.dtype.is_floating_point else 0,
    aten.is_nonzero.default: lambda x: False,
    aten.equal.default: lambda x, y: True,
}
"""What needs a number on the host, and the number."""


class Synchronizations:
    """Where the host has waited for the GPU, in each iteration."""

    def __init__(self) -> None:
        self.iterations: list[Counter[str]] = [Counter()]

    def add(self) -> None:
        """The present line waits."""
        self.iterations[-1][_place()] += 1


def _place() -> str:
    """``FILE:LINE FUNCTION: SOURCE`` of the innermost frame that is of the project or DeepSpeed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        file = path.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
        if file.startswith(("megatron/", "deepspeed/")) and "/accelerator/" not in file or function == "planted":
            return f"{file}:{line} {function}: {linecache.getline(path, line).strip()}"
        frame = frame.f_back
    return "?"


def planted(loss: Tensor) -> None:
    """Wait for the GPU."""
    loss.item()


class FakeGpu(TorchDispatchMode):
    """Tensors on the GPU are fake, those on the host real. Writes down what waits."""

    def __init__(self, found: Synchronizations):
        super().__init__()
        self._found, self._fake = found, FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        target = kwargs.get("device")
        if func.namespace == "c10d" and len(on_gpu) < len(tensors) and "barrier" not in str(func):
            raise RuntimeError(f"a host tensor in the collective {func} at {_place()}")
        if not on_gpu and not (target is not None and torch.device(target).type == "cuda"):
            return func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if str(func).startswith("aten._fused_") and len(on_gpu) < len(tensors):
            raise RuntimeError(f"a host tensor, which {func} reads by its address on the GPU, at {_place()}")
        if func in ANSWERS:
            self._found.add()
            return ANSWERS[func](*args)
        if func in DATA_DEPENDENT or indexes_by_mask(func, args) or _repeats_unknown_times(func, kwargs):
            self._found.add()
            with self._fake:
                return all_of(func, *args)
        if func is aten.copy_.default and args[0].is_cpu:
            args[0].zero_()
        if copies := _copy_between(func, args, kwargs):
            source, result, waits = copies
            if waits:
                self._found.add()
            if result is not None:
                return result
            if not source.is_cuda:
                with self._fake:
                    return torch.empty_strided(
                        source.size(), source.stride(), dtype=kwargs.get("dtype") or source.dtype, device=target
                    )
        with self._fake:
            found = func(*args, **kwargs)
        return tree_map(_host_tensor_is_real, found)  # not within, where it would be fake again


def _repeats_unknown_times(func: Any, kwargs: dict) -> bool:
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _copy_between(func: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None, bool] | None:
    """For a copy between host and GPU: its source, its result if that is a tensor that exists, and whether it waits."""
    if func is aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return args[1], args[0], not non_blocking
    if func is aten._to_copy.default and "device" in kwargs and (kwargs["device"].type == "cuda") != args[0].is_cuda:
        return args[0], None, not kwargs.get("non_blocking", False)
    return None


def _host_tensor_is_real(value: Any) -> Any:
    if isinstance(value, FakeTensor) and value.is_cpu:
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


@contextmanager
def linted(found: Synchronizations) -> Iterator[None]:
    """While inside, ``cuda`` is fake, and synchronizations are found."""
    from emulated_torch_cuda import Event, Stream

    recorded = Event.record

    def record(event: Event, stream: Any = None) -> None:
        recorded(event)
        event.iteration = len(found.iterations)  # type: ignore[attr-defined]

    def wait_for(event: Event) -> None:
        if getattr(event, "iteration", None) == len(found.iterations):  # of an earlier one, the GPU still has work
            found.add()

    def wait(*_: Any) -> None:
        found.add()

    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device="cuda") by way of the dispatcher
    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "_apply", apply_in_place))
        stack.enter_context(patch.object(torch.cuda, "synchronize", wait))
        stack.enter_context(patch.multiple(Event, record=record, synchronize=wait_for))
        stack.enter_context(patch.object(Stream, "synchronize", wait))
        stack.enter_context(FakeGpu(found))
        yield
    torch._C._set_only_lift_cpu_tensors(lifts)


@contextmanager
def fake_ranks(run: Any) -> Iterator[None]:
    """While inside, the training program joins a fake process group, of which nothing is received."""
    from deepspeed import init_distributed
    from deepspeed.runtime.zero import partitioned_param_coordinator, utils

    from megatron.engines import build as engines
    from megatron.engines import transfers
    from megatron.launch.progress import ProgressState
    from megatron.ops import attention
    from megatron.ops.choices import DeviceFacts
    from megatron.parallel.expert import routes
    from megatron.parallel.layout import ParallelLayout
    from megatron.parallel.tensor.random import model_parallel_manual_seed
    from megatron.training import data_iterators, setup

    build_module, rows_of_ranks = engines.build_module, routes.rows_of_ranks

    def all_gather_object(objects: list, value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    def broadcast_object_list(objects: list, *_: Any, **__: Any) -> None:
        objects[:] = [value or (None, None, []) for value in objects]  # of the first rank: no result, no error

    def receive_row(*_: Any) -> list[int]:
        shards = run.parallel.model_parallel_size if run.parallel.sequence_parallel else 1
        shape = [run.train.micro_batch_size, run.data.seq_length // shards, run.model.hidden_size]
        dtype = getattr(torch, {"bf16": "bfloat16"}.get(run.precision.dtype, "float32"))
        hidden = torch.empty(shape, dtype=dtype, device="meta")
        # The gradient of hidden states that are sent together with segment ids, which have none.
        return transfers._row((hidden,) if run.model.layers_need_segment_ids else hidden)

    def equal_rows_of_ranks(going: Tensor, coming: Tensor) -> list[list[int]]:
        rows_of_ranks(going, coming)  # which waits
        rows = run.train.micro_batch_size * run.data.seq_length * run.model.moe_router_topk
        return [[rows // len(going)] * len(going)] * 2

    def build_on_gpu(run: Any, layout: ParallelLayout) -> nn.Module:
        with torch.device("cuda", torch.cuda.current_device()):  # a real weight could not become fake later
            return build_module(run, layout)

    @contextmanager
    def initialized_ranks(run: Any, callbacks: Any) -> Iterator[tuple[ParallelLayout, ProgressState]]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=run.parallel.world_size
        )
        init_distributed("fake", auto_mpi_discovery=False, verbose=False)
        layout = ParallelLayout.create(run.parallel)
        model_parallel_manual_seed(run.train.seed, layout)
        yield layout, ProgressState()

    with ExitStack() as stack:
        for owner, name, value in (
            (dist, "all_gather_object", all_gather_object),
            (dist, "broadcast_object_list", broadcast_object_list),
            (data_iterators, "on_rank_0", lambda step: step()),
            (setup, "initialized_ranks", initialized_ranks),
            (engines, "build_module", build_on_gpu),
            (attention, "device_facts", lambda device: DeviceFacts("cuda", (9, 0))),
            (routes, "rows_of_ranks", equal_rows_of_ranks),
            (transfers.Transfers, "_received_row", receive_row),
            (utils, "assert_ints_same_as_other_ranks", lambda ints: None),
            (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def main(report: str, *words: str) -> int:
    """Train one rank, and write the synchronizations of each iteration."""
    from megatron.cli import read_run
    from megatron.launch.environment import prepare_environment
    from megatron.training.preflight import check
    from megatron.training.trainer import Trainer
    from pretrain_gpt2 import train

    run, _ = check(read_run(list(words), os.environ).checked())
    prepare_environment(os.environ, run.parallel)
    found, step = Synchronizations(), Trainer._step

    def counted_step(trainer: Trainer, *arguments: Any) -> Tensor:
        found.iterations.append(Counter())
        loss = step(trainer, *arguments)
        if len(found.iterations) == 2:
            planted(loss)
        return loss

    with linted(found), fake_ranks(run), patch.object(Trainer, "_step", counted_step):
        code = train(run, [])
    Path(report).write_text(json.dumps(found.iterations))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
