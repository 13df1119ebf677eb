"""One rank of a larger run on a GPU that computes nothing, and where its host would wait for it.

    python waits.py REPORT WORLD_SIZE RANK PROGRAM FLAGS...

trains as ``python PROGRAM FLAGS`` does, as a fake rehearsed rank on the emulated device: shapes, types and devices of
every operation are checked. Raises RuntimeError for a host tensor in a collective or in a fused operation. ``REPORT``
becomes a JSON list with the waits of each iteration, those of the start first: ``{"FILE:LINE FUNCTION: SOURCE":
times}``. The first iteration has one more, which is planted here.
"""

import json
import linecache
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from emulated_torch_cuda import Event, Stream
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from megatron.ops import attention  # noqa: E402
from megatron.ops.choices import DeviceFacts  # noqa: E402
from megatron.tools import pretraining  # noqa: E402
from megatron.tools.one_rank.group import OneRankGroup, Operation  # noqa: E402
from megatron.tools.one_rank.run import one_rank, run_program  # noqa: E402
from megatron.tools.rehearsal.counts import waits  # noqa: E402
from megatron.tools.rehearsal.fake import fake_device  # noqa: E402
from megatron.training.callbacks import Callback  # noqa: E402


class Waits(TorchDispatchMode, Callback):
    """While inside, notes the lines at which the host waits for the GPU, in each iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.iterations: list[Counter[str]] = [Counter()]

    def add(self, *_: Any) -> None:
        """The present line waits."""
        self.iterations[-1][_place()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if waits(func, args, kwargs, tensors):
            self.add()
        if str(func).startswith("aten._fused_"):
            _check_devices(tensors, f"{func}, which reads it by its address on the GPU,")
        return func(*args, **kwargs)

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[tuple]:
        """Count apart what waits in it."""
        self.iterations.append(Counter())
        yield ()
        if iteration == 1:
            planted(torch.zeros((), device="cuda"))

    def issued(self, operation: Operation) -> None:
        """Called for each collective and transfer."""
        _check_devices((*operation.written, *operation.read), operation.kind)

    waited = grouped = lambda *_: None


def planted(loss: Tensor) -> None:
    """Wait for the GPU."""
    loss.item()


def _check_devices(tensors: Sequence[Tensor], where: str) -> None:
    if any(tensor.is_cuda for tensor in tensors) and not all(tensor.is_cuda for tensor in tensors):
        raise RuntimeError(f"a host tensor in {where} at {_place()}")


def _place() -> str:
    """``FILE:LINE FUNCTION: SOURCE`` of the innermost frame that is of the project or DeepSpeed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        file = path.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
        is_part = file.startswith(("megatron/", "deepspeed/")) and "/tools/" not in file and "/accelerator/" not in file
        if is_part or function == "planted":
            return f"{file}:{line} {function}: {linecache.getline(path, line).strip()}"
        frame = frame.f_back
    return "?"


def main(report: str, world_size: str, rank: str, program: str, *words: str) -> int:
    """Train one rank, and write the waits of each iteration."""
    found, recorded = Waits(), Event.record

    def record(event: Event, stream: Any = None) -> None:
        recorded(event)
        event.iteration = len(found.iterations)  # type: ignore[attr-defined]

    def wait_for(event: Event) -> None:
        if getattr(event, "iteration", None) == len(found.iterations):  # of an earlier one, the GPU still has work
            found.add()

    with ExitStack() as stack:
        for owner, name, value in (
            (pretraining, "default_callbacks", lambda: [found]),
            (OneRankGroup, "observer", found),
            (attention, "device_facts", lambda device: DeviceFacts("cuda", (9, 0))),
            (torch.cuda, "synchronize", found.add),
            (Stream, "synchronize", found.add),
            (Event, "record", record),
            (Event, "synchronize", wait_for),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(one_rank(int(world_size), int(rank)))
        stack.enter_context(fake_device())
        stack.enter_context(found)
        code = run_program(ROOT / program, words)
    Path(report).write_text(json.dumps(found.iterations))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
