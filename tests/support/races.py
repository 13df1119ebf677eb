"""Delays what runs beside the computation as far as it may be delayed, so that a missing wait changes numbers.

    torchrun --nproc-per-node 2 tests/support/races.py FLAGS...

trains as ``pretrain_gpt2.py FLAGS`` does, without and with delays, and compares losses, gradients and weights of each
step, bit by bit. Exits with 1 if they differ, and prints where.

With gloo, an asynchronous collective or transfer computes on copies. What it writes to holds NaN until ``wait``, and
what it reads is compared with the copy then: a buffer that is read, written or used again too early is found. On GPUs,
it begins after a sleep on a stream of its own, as do other side streams after each switch to them, and the compute
stream sleeps after each optimizer step.

``late_streams`` has copies to host memory run as late as the waits of the compute stream allow, on the CPU.
"""

import inspect
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from xxhash import xxh3_128_hexdigest

Found = list[str]
"""What is wrong, one line each."""

WRITTEN = {
    "all_reduce": "tensor", "all_gather": "tensor_list", "all_gather_into_tensor": "output_tensor", "irecv": "tensor",
    "reduce_scatter_tensor": "output", "all_to_all_single": "output",
}  # fmt: skip
READ = {
    "all_gather": "tensor", "all_gather_into_tensor": "input_tensor", "reduce_scatter_tensor": "input",
    "all_to_all_single": "input", "isend": "tensor",
}  # fmt: skip
"""The arguments that each operation writes and reads; an all-reduce does both."""
OPERATIONS = sorted(WRITTEN.keys() | READ.keys())
SLEEP = 20_000_000
"""Cycles of a GPU: about 10 ms."""
PATIENCE = 1.0
"""Seconds that a copy on a late stream takes if the compute stream does not wait for it: some steps."""


class LateWork:
    """An asynchronous work on ``written``, which has begun with the tensors ``private`` instead."""

    def __init__(
        self, what: str, work: Any, written: list[Tensor], private: list[Tensor], read: list[Tensor], found: Found
    ):
        self._what, self._work, self._found, self._results = what, work, found, list(zip(written, private, strict=True))
        before = [(x, x.clone()) for x in read]
        for x in written:
            x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
        for x, value in before:
            x.copy_(value)  # it may be a part of what is written
        self._expected = [(x, x.clone()) for x in (*read, *written)]
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        """Write the result, after a look at what others have done to the tensors meanwhile."""
        if not self._is_done:
            self._is_done = True
            if not all(bits(x) == bits(expected) for x, expected in self._expected):
                self._found.append(f"{self._what}: a buffer was overwritten before the wait")
            self._work.wait()
            for x, result in self._results:
                x.copy_(result)
        return True

    def is_completed(self) -> bool:
        """Not before the wait."""
        return self._is_done

    def __del__(self) -> None:
        if not self._is_done:
            self._found.append(f"{self._what}: nothing waits for it")
            self._work.wait()  # gloo needs it


def bits(x: Tensor) -> str:
    """A hash of the bytes of ``x``."""
    return xxh3_128_hexdigest(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _place() -> str:
    """The line of the project or of DeepSpeed's ZeRO or pipeline that has started something."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        if "/megatron/" in path or "/deepspeed/runtime/" in path:
            return f"{'/'.join(Path(path).parts[-3:])}:{line}"
    return "?"


def _late(real: Callable, found: Found) -> Callable:
    """``real``, a collective or transfer, whose asynchronous work is late; with gloo."""
    signature = inspect.signature(real)
    writes, reads = ([names[real.__name__]] if real.__name__ in names else [] for names in (WRITTEN, READ))

    @wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        if not _is_async(bound):
            return real(*arguments, **options)
        tensors = tree_map(Tensor.detach, {name: bound.arguments[name] for name in (*writes, *reads)})
        bound.arguments.update(tree_map(Tensor.clone, tensors))
        written, private = (tree_leaves([of[name] for name in writes]) for of in (tensors, bound.arguments))
        work = real(*bound.args, **bound.kwargs)
        what = f"{real.__name__} at {_place()}"
        return work and LateWork(what, work, written, private, [tensors[name] for name in reads], found)

    return call


def _is_async(bound: inspect.BoundArguments) -> bool:
    """Whether a call of a collective is asynchronous; transfers are."""
    return bound.arguments.get("async_op", "async_op" not in bound.signature.parameters)


def _late_on_gpu(real: Callable) -> Callable:
    """``real``, whose asynchronous work begins after a sleep, for which the compute stream does not wait."""
    signature = inspect.signature(real)

    @wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        if not _is_async(signature.bind(*arguments, **options)):
            return real(*arguments, **options)
        (stream := torch.cuda.Stream()).wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # which sleeps
            return real(*arguments, **options)

    return call


@contextmanager
def delays(found: Found) -> Iterator[None]:
    """While inside, everything asynchronous is late."""
    from deepspeed.comm import comm

    is_gpu = dist.get_backend() == "nccl"
    late = _late_on_gpu if is_gpu else partial(_late, found=found)
    with ExitStack() as stack:
        for name in OPERATIONS:
            function = late(getattr(dist, name))
            for module in (dist, dist.distributed_c10d):
                stack.enter_context(patch.object(module, name, function))
        for name, function in (
            ("all_gather_function", dist.all_gather_into_tensor),
            ("reduce_scatter_function", dist.reduce_scatter_tensor),
        ):
            stack.enter_context(patch.object(comm.cdb, name, function))
        if is_gpu:
            enter, sleep = torch.cuda.StreamContext.__enter__, torch.cuda._sleep
            asleep = lambda context: (enter(context), sleep(SLEEP))  # noqa: E731
            stack.enter_context(patch.object(torch.cuda.StreamContext, "__enter__", asleep))
            stack.callback(torch_optimizer.register_optimizer_step_post_hook(lambda *_: sleep(SLEEP)).remove)
        yield


class LateStream:
    """A queue of copies of a device, each made when something waits for it."""

    def __init__(self, found: Found):
        self._found, self._lock, self._copies = found, threading.RLock(), deque[Callable[[], None]]()
        self.has_waited = False

    def wait_stream(self, compute: Any) -> None:
        """Do what comes after what the compute stream has to do now."""
        self.has_waited = True

    def add(self, into: Tensor, source: Tensor) -> None:
        """Copy ``source``, whose memory may be freed meanwhile."""
        weak, place, has_waited = StorageWeakRef(source.untyped_storage()), _place(), self.has_waited
        dtype, view = source.dtype, (source.storage_offset(), source.shape, source.stride())

        def copy() -> None:
            storage = None if weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                self._found.append(f"copy at {place}: its source is freed before")
            elif not has_waited:
                self._found.append(f"copy at {place}: its stream does not wait for the compute stream")
            else:
                into.copy_(torch.empty(0, dtype=dtype).set_(storage, *view))

        self._copies.append(copy)

    def run(self, patience: float = 0) -> None:
        """Make the copies, unless another thread does so within that many seconds."""
        end = time.monotonic() + patience
        while self._copies and time.monotonic() < end:
            time.sleep(0.001)
        with self._lock:
            while self._copies:
                self._copies.popleft()()


class _Queueing(TorchDispatchMode):
    def __init__(self, stream: LateStream):
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:  # non_blocking
            self._stream.add(*args[:2])
            return args[0]
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}  # not on a CPU
        return function(*args, **kwargs)


@contextmanager
def late_streams(found: Found) -> Iterator[None]:
    """While inside, asynchronous saves and snapshots take the CPU for a device, whose side streams are late."""
    from megatron.checkpoint import engine_files

    inside: list[LateStream] = []

    class Event:
        def record(self) -> None:
            self.stream = inside[-1]

        def synchronize(self) -> None:
            self.stream.run(PATIENCE)

    @contextmanager
    def entered(stream: LateStream) -> Iterator[None]:
        inside.append(stream)
        with _Queueing(stream):
            yield
        inside.pop().has_waited = False

    compute = SimpleNamespace(wait_event=lambda event: event.stream.run() if hasattr(event, "stream") else None)
    device = SimpleNamespace(Stream=partial(LateStream, found), Event=Event, stream=entered, device_name=lambda: "late")
    device.current_stream = lambda: compute
    with patch.object(engine_files, "get_accelerator", lambda: device):
        yield


def trained(words: list[str], save: Path | None = None) -> list[tuple[str, str]]:
    """Train on this rank. (what, hash) of the loss, gradients and weights of each step, and of what is in ``save``."""
    from support.training import pretrain

    from megatron.checkpoint.snapshots import Snapshots
    from megatron.training import trainer

    kept: list[tuple[str, Tensor]] = []

    def keep(what: str, optimizer: Any, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tensors = [parameter.grad for parameter in parameters] if what == "gradient" else parameters
        kept.extend((what, x.detach().clone()) for x in tensors if x is not None)

    def train_batch(*arguments: Any) -> Tensor:
        kept.append(("loss", loss := real(*arguments)))
        return loss

    real = trainer.train_batch
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        words = [*words, "--save", str(save / "ck"), "--snapshot-dir", str(save)]
    with ExitStack() as stack:
        stack.enter_context(patch.object(trainer, "train_batch", train_batch))
        stack.enter_context(patch.object(Snapshots, "remove", Snapshots.finish))
        stack.callback(torch_optimizer.register_optimizer_step_pre_hook(partial(keep, "gradient")).remove)
        stack.callback(torch_optimizer.register_optimizer_step_post_hook(partial(keep, "weight")).remove)
        code, output = pretrain(words)
    assert code == 0, output
    for name, file in sorted(("/".join(file.parts[-2:]), file) for file in save.rglob("*.pt")) if save else ():
        tensors = tree_leaves(torch.load(file, weights_only=False))
        kept += [(name, x) for x in tensors if isinstance(x, Tensor)]
    return [(what, bits(x)) for what, x in kept]


def hunted(words: list[str], expected: list[tuple[str, str]], save: Path | None = None) -> Found:
    """What is wrong with a run with delays, whose losses, gradients, weights and files should be ``expected``."""
    found: Found = []
    with delays(found), late_streams(found) if save else ExitStack():
        try:
            trace = trained(words, save)
        except Exception as error:  # numbers that no code expects
            return [*found, f"{type(error).__name__}: {error}"]
    differ = [f"{what} differs" for (what, one), (_, other) in zip(expected, trace, strict=False) if one != other]
    return found + differ[:1] + [f"{len(trace)} tensors for {len(expected)}"] * (len(trace) != len(expected))


def main() -> NoReturn:
    """Compare a run with one without delays."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from megatron.engines import nothing_compiled_for_collectives
    from megatron.launch.environment import prepare_environment

    prepare_environment(os.environ)
    nothing_compiled_for_collectives()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    is_cpu = get_accelerator().device_name() == "cpu"
    deepspeed.init_distributed("gloo" if is_cpu else get_accelerator().communication_backend_name(), verbose=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = trained(sys.argv[1:])
    found = hunted(sys.argv[1:], expected)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(f"{len(expected)} tensors of rank 0 compared:", *(every if any(every) else ["all ranks equal"]), sep="\n")
    sys.stdout.flush()
    os._exit(any(every))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    main()
