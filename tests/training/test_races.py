"""Training with everything asynchronous as late as it may be equals training without, and planted faults are found.

``support/races.py`` does the same for any flags: see docs/testing.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from support.programs import TINY_MODEL, Programs
from support.races import LateStream, hunted, late_streams, trained
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron.checkpoint import engine_files
from megatron.checkpoint.engine_files import PinnedCopies
from megatron.engines.gradients import GradientBucket
from megatron.engines.sharded_weights import ShardedWeights
from megatron.engines.transfers import Transfers, as_list
from megatron.parallel import sequence
from megatron.parallel.tensor import mappings

STEPS = "--num-layers 2 --train-iters 2 --batch-size 1 --gas 2 --eval-iters 0 --ddp-bucket-size 5000"


class Early:
    """A work for which nobody waits."""

    def __init__(self, work: Any):
        self._work = work

    def wait(self) -> None:
        """Nothing."""


def gradients_are_not_awaited(bucket: GradientBucket) -> None:
    bucket._started = bucket._started._replace(work=Early(bucket._started.work))
    finish(bucket)


def sent_gradients_are_used_again(bucket: GradientBucket) -> None:
    start(bucket)
    bucket._started.sent.zero_()


def received_activations_are_not_awaited(transfers: Transfers, one: Any) -> Any:
    return transfers._arriving.pop(one)[1]


def sent_activations_are_used_again(transfers: Transfers, transfer: Any, value: Any) -> None:
    send(transfers, transfer, value)
    for x in as_list(value):
        x.zero_()


def keys_of_the_ring_are_not_awaited(*arguments: Any) -> Callable[[], Tensor]:
    arrived = pass_on(*arguments)
    cells = dict(zip(arrived.__code__.co_freevars, arrived.__closure__, strict=True))
    return lambda: cells["received"].cell_contents


def sent_keys_are_used_again(*arguments: Any) -> Callable[[], Tensor]:
    arrived = pass_on(*arguments)
    arrived.sent.zero_()
    return arrived


def sources_are_freed(copies: PinnedCopies, item: Any, used: Any = ()) -> Any:
    temporary = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, item)
    copied = start_copies(copies, temporary, used)
    copies._sources.clear()
    return copied


def buffers_are_used_again(item: Any, used: Any = (), *, pinned: bool = False) -> Any:
    memory = [BUFFERS.setdefault(x.shape, torch.empty_like(x)) for x in engine_files.tensors_of(item)]
    return in_host_memory(item, memory, pinned=pinned)


finish, start, pass_on, send = GradientBucket.finish, GradientBucket.start, sequence._pass_on, Transfers.send
start_copies, in_host_memory = PinnedCopies.start, engine_files.in_host_memory
gather, BUFFERS = partition_parameters._dist_allgather_fn, dict[torch.Size, Tensor]()

Faults = dict[str, tuple[Any, str, Callable]]
"""By name: a method, and what is in its place."""
CASES: dict[str, tuple[str, Faults]] = {
    "ZeRO 1": (
        "--zero-stage 1 --bf16 --grad-accum-dtype fp32",
        {
            "weights": (ShardedWeights, "wait", lambda weights, _=None: weights._gathering.clear()),
            "gradients": (GradientBucket, "finish", gradients_are_not_awaited),
            "reused": (GradientBucket, "start", sent_gradients_are_used_again),
        },
    ),
    "ZeRO 2": (
        "--zero-stage 2",
        {
            "gradients": (GradientBucket, "finish", gradients_are_not_awaited),
            "reused": (GradientBucket, "start", sent_gradients_are_used_again),
        },
    ),
    "ZeRO 3": (
        "--zero-stage 3",
        {"weights": (partition_parameters, "_dist_allgather_fn", lambda *tensors: Early(gather(*tensors)))},
    ),
    "pipeline": (
        "--zero-stage 1 --pipe-parallel-size 2 --pipeline-schedule zbh1",
        {
            "activations": (Transfers, "take", received_activations_are_not_awaited),
            "reused": (Transfers, "send", sent_activations_are_used_again),
        },
    ),
    "ring": (
        "--zero-stage 1 --context-parallel-size 2",
        {
            "keys": (sequence, "_pass_on", keys_of_the_ring_are_not_awaited),
            "reused": (sequence, "_pass_on", sent_keys_are_used_again),
            "freed": (GradientBucket, "_add_kept", lambda bucket: bucket._kept.clear()),
        },
    ),
    "tensor parallel": (
        "--zero-stage 1 --model-parallel-size 2 --sequence-parallel",
        {"sums": (mappings, "_when_done", lambda x, work: x)},
    ),
    "experts": (
        "--zero-stage 1 --num-experts 4 --expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 16",
        {"tokens": (mappings, "_when_done", lambda x, work: x)},
    ),
    "asynchronous save": (
        "--zero-stage 1 --async-save --save-interval 1 --snapshot-interval 1 --auto-resume",
        {
            "update": (PinnedCopies, "_delay_update", lambda *_: None),
            "writer": (PinnedCopies, "wait", lambda _: None),
            "compute": (LateStream, "wait_stream", lambda *_: None),
            "freed": (PinnedCopies, "start", sources_are_freed),
            "reused": (engine_files, "in_host_memory", buffers_are_used_again),
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_delays_change_nothing_and_faults_are_found(run_ranks_once, programs: Programs, tmp_path, case: str) -> None:
    flags, faults = CASES[case]
    words = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *STEPS.split(), *flags.split()]
    folder = tmp_path if "--async-save" in words else None
    of_ranks = run_ranks_once(2, hunt, words, case, folder, time_limit=120)
    for found in of_ranks:
        assert found.pop("none") == []
    for fault in faults:
        assert any(found[fault] for found in of_ranks), f"{fault} is not found"


def hunt(words: list[str], case: str, folder: Path | None) -> dict[str, list[str]]:
    """What is found without a fault, and with each."""

    def save(name: str) -> Path | None:
        return folder / name if folder else None

    expected = trained(words, save("plain"))
    assert {"loss", "gradient", "weight"} <= {what for what, _ in expected}
    found = {"none": hunted(words, expected, save("none"))}
    for fault, place in CASES[case][1].items():
        with patch.object(*place):
            found[fault] = hunted(words, expected, save(fault))
    return found


def test_memory_for_copies_is_allocated_after_the_first_step(run_ranks_once, programs: Programs, tmp_path) -> None:
    """So that no save and no snapshot waits for pinned memory."""
    flags = "--train-iters 5 --zero-stage 1 --async-save --save-interval 2 --snapshot-interval 3 --auto-resume".split()
    words = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *STEPS.split(), *flags]
    (allocated,) = run_ranks_once(1, allocated_after_each_step, words, tmp_path)
    assert allocated[0] > 10 and not any(allocated[1:])


def allocated_after_each_step(words: list[str], folder: Path) -> list[int]:
    """Tensors of copies that are not in the memory of earlier ones."""
    from megatron.training import trainer

    allocated: list[int] = []

    def train_batch(*arguments: Any) -> Tensor:
        allocated.append(0)
        return real(*arguments)

    def counted(item: Any, used: Any = (), *, pinned: bool = False) -> Any:
        copied = in_host_memory(item, used, pinned=pinned)
        allocated[-1] += sum(all(x is not known for known in used) for x in engine_files.tensors_of(copied))
        return copied

    real = trainer.train_batch
    with patch.object(trainer, "train_batch", train_batch), patch.object(engine_files, "in_host_memory", counted):
        with late_streams([]):
            trained(words, folder)
    return allocated
