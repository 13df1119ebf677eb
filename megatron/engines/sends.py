"""Sends of DeepSpeed's 1F1B pipeline that do not wait for their receivers, over gloo."""

from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.distributed import Work

from megatron.engines.engine import replaced


def send_without_waiting(engine: PipelineEngine) -> None:
    """Let a stage compute on while what it has sent is on its way. All of it has arrived at the end of a batch.

    A stage keeps the last tensors that it has sent, as many as there are stages.

    DeepSpeed 0.19.8: runtime/pipe/p2p.py calls ``dist.send``, which over gloo returns when the other stage has received
    the tensor: a stage waits for another one that still computes. NCCL does not wait.
    Test: tests/engines/test_sends.py. Remove when DeepSpeed sends with ``isend``.
    """
    if dist.get_backend() != "gloo":
        return
    execute, sends = engine._exec_schedule, _Sends(engine.grid.stage_to_global, most=engine.num_stages)

    def execute_and_finish(schedule: object) -> None:
        with replaced(p2p, send=sends.send):
            execute(schedule)
        sends.finish()

    engine._exec_schedule = execute_and_finish


class _Sends:
    """At most ``most`` tensors on their way; ``rank_of`` maps a stage to its rank among all ranks."""

    def __init__(self, rank_of: Callable[..., int], most: int):
        self._rank_of, self._most = rank_of, most
        self._blocking = p2p.send
        self._leaving = deque[tuple[Work, Tensor]]()

    def send(self, tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
        """Instead of ``p2p.send``. The tensor must not change any more."""
        if not tensor.is_cpu:
            self._blocking(tensor, dest_stage, async_op)
            return
        tensor = tensor.detach()  # without the graph that made it
        work = dist.isend(tensor, self._rank_of(stage_id=dest_stage))
        assert work is not None, "this rank is in the default group"
        self._leaving.append((work, tensor))
        self._wait(self._most)

    def finish(self) -> None:
        """Wait until all tensors have arrived."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        while len(self._leaving) > most:
            work, _ = self._leaving.popleft()
            work.wait()
