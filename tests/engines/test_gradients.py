"""Gradients in flat buckets, against DeepSpeed's own ZeRO 1 and 2."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.programs import TINY_MODEL, Programs, read_metrics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.engines import zero
from megatron.engines.gradients import GradientBucket, Gradients

STEPS = "--train-iters 3 --batch-size 2 --gas 2 --clip-grad 0.4 --eval-iters 0 --ddp-bucket-size 5000"
LAYOUTS = [
    "--zero-stage 1 --bf16 --grad-accum-dtype fp32",
    "--zero-stage 2",
    "--zero-stage 1 --optimizer muon",
    "--zero-stage 1 --bf16 --no-zero-reduce-scatter --deepspeed_config scaled.json",
    "--zero-stage 1 --bf16 --grad-accum-dtype fp32 --deepspeed_config prescaled.json",
    "--zero-stage 2 --bf16 --deepspeed_config aligned.json",
]
CONFIGS = {
    "scaled": {"gradient_predivide_factor": 4, "zero_optimization": {"parameter_alignment": True}},
    "prescaled": {"prescale_gradients": True},
    "aligned": {"zero_optimization": {"parameter_alignment": True}},
}
"""Of DeepSpeed, by the names of their files."""


def test_steps_are_those_of_deepspeed(run_ranks_once, programs: Programs, tmp_path: Path) -> None:
    """Losses, norms and clipped updates."""
    common = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *STEPS.split()]
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    run_ranks_once(2, train_both_ways, common, tmp_path)
    for number, layout in enumerate(LAYOUTS):
        own, theirs = (read_metrics(tmp_path / f"{number}-{way}") for way in ("own", "theirs"))
        for name in ("lm_loss", "grad_norm"):
            expected = [line[name] for line in theirs]
            assert [line[name] for line in own] == pytest.approx(expected, rel=2e-3), f"{name}, {layout}"


def train_both_ways(common: list[str], folder: Path) -> None:
    from support.training import pretrain

    os.chdir(folder)
    for number, layout in enumerate(LAYOUTS):
        for way in ("own", "theirs"):
            zero._has_buckets = lambda options, way=way: way == "own"
            code, output = pretrain([*common, *layout.split(), "--metrics-file", str(folder / f"{number}-{way}")])
            assert code == 0, output


@pytest.mark.parametrize("layout", ["--zero-stage 1", "--zero-stage 2", "--zero-stage 1 --pipe-parallel-size 1"])
def test_buckets_are_reduced_during_the_backward_pass(layout: str, run_ranks_once, programs: Programs) -> None:
    """The bucket of norms and biases, of which the first layer has some, does not hold up the last layers."""
    common = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *STEPS.split(), *layout.split()]
    for first_start, gradients in run_ranks_once(2, gradients_before_the_first_start, common):
        assert gradients > 20 and first_start < gradients / 2


@pytest.mark.ranks(1)
def test_a_kernel_adds_several_gradients() -> None:
    """Those of a pass at most: two gradients of a parameter in one kernel would be a race."""
    parameters = [nn.Parameter(torch.randn(3, 4)) for _ in range(5)]
    settings: dict[str, Any] = dict.fromkeys(("dtype", "sent_dtype"), torch.float32) | {"divisor": 1.0}
    bucket = GradientBucket(
        parameters, torch.zeros(60), dist.group.WORLD, is_sharded=False, is_last=False, adds_together=True, **settings
    )
    gradients, added = Gradients([bucket], lambda: 2, [0]), []

    class Adds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            added.extend([len(args[0])] if func is torch.ops.aten._foreach_add_.List else [])
            return func(*args, **(kwargs or {}))

    with Adds():
        for _ in range(2):
            torch.cat([parameter.flatten().square() for parameter in parameters]).sum().backward()
    gradients.reduce()
    assert added == [5, 5]
    assert torch.equal(gradients.parts[0], 4 * torch.cat([parameter.detach().flatten() for parameter in parameters]))


def gradients_before_the_first_start(words: list[str]) -> tuple[int, int]:
    """Gradients of the last backward pass that had arrived when the first bucket was reduced, and all of the pass."""
    from support.training import pretrain

    arrived: list[int] = []
    found: list[tuple[int, int]] = []
    on_gradient, start, reduce = Gradients._on_gradient, GradientBucket.start, Gradients.reduce
    starts: list[int] = []

    def counted(self: Gradients, *arguments) -> None:
        arrived.append(1)
        on_gradient(self, *arguments)

    def started(self: GradientBucket) -> None:
        starts.append(len(arrived))
        start(self)

    def reduced(self: Gradients) -> None:
        in_pass = len(arrived) // (1 if self._passes() == 1 else 2)  # STEPS has two micro-batches
        reduce(self)
        found.append((starts[0] - (len(arrived) - in_pass), in_pass))
        arrived.clear()
        starts.clear()

    Gradients._on_gradient, GradientBucket.start, Gradients.reduce = counted, started, reduced  # type: ignore[method-assign]
    code, output = pretrain(words)
    assert code == 0, output
    return max(found)
