"""How long a snapshot in memory blocks training, and how much memory it takes; rows of ``checkpoints``.

The same engine takes a snapshot, saves, and copies its state, in alternation. The first snapshots take new memory, and
are not counted. Of two hosts each also holds the other's, which doubles the memory, and takes no time of training.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.comparing import Quantity
from megatron.checkpoint.engine_files import in_host_memory
from megatron.checkpoint.save import Checkpointer
from megatron.checkpoint.snapshot_files import SLOTS, planned_bytes, snapshot_folder
from megatron.checkpoint.snapshots import LiveState, Snapshots
from megatron.config import RunConfig

STALL_GOAL, MEMORY_GOAL = 0.25, 1.05
"""Of the time of a synchronous save; of the planned memory."""


def of_snapshots(
    engine: Any, run: RunConfig, rounds: int, seconds: Callable[[Callable[[], Any]], float]
) -> list[Quantity]:
    """Seconds that training waits for a snapshot, and its bytes."""
    run = replace(run, checkpoint=replace(run.checkpoint, snapshot_interval=1, keep_last=1))
    checkpointer = Checkpointer(engine, run, lambda text: None)
    snapshots = Snapshots(checkpointer, run, lambda text: None)
    path = Path(run.checkpoint.save or "") / "copied"
    state = [content for _, content in checkpointer.collect(1, (), path, LiveState())[1]]
    memory = [leaf for leaf in tree_leaves(in_host_memory(state)) if isinstance(leaf, Tensor)]
    waited, behind, saved, copied = list[float](), list[float](), list[float](), list[float]()
    for step in range(1, rounds + 3):
        os.sync()
        waited.append(seconds(lambda: snapshots.take(step)))  # noqa: B023
        behind.append(waited[-1] + seconds(snapshots.finish))
        if step > len(SLOTS):
            saved.append(seconds(lambda: checkpointer.save(step)))  # noqa: B023
            copied.append(seconds(lambda: in_host_memory(state, memory)))
    folder = snapshot_folder(run.checkpoint)
    taken = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    snapshots.remove()
    del waited[: len(SLOTS)], behind[: len(SLOTS)]
    what = f"--snapshot-interval: time that training waits; complete after {median(behind):.2g} s"
    return [
        Quantity(what, "a synchronous save", waited, saved, "s", most=STALL_GOAL),
        Quantity(what, "copying the state alone", waited, copied, "s"),
        Quantity(
            "--snapshot-interval: memory of the two snapshots of a rank", "the plan",
            [sum(taken)] * rounds, [len(SLOTS) * sum(planned_bytes(run))] * rounds, "B", most=MEMORY_GOAL,
        ),
    ]  # fmt: skip
