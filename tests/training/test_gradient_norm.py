"""The norm of a gradient, beside the same in fp64; and steps without the copies of gradients that DeepSpeed makes."""

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.engines import zero
from megatron.engines.zero import ZeroOptimizer, block_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 65_537, 30_000_000])
def test_norm_of_blocks_equals_the_full_norm(dtype: torch.dtype, elements: int):
    """A single sum of 30 million squares in fp32 is wrong by a thousandth."""
    torch.manual_seed(1)
    gradient = (torch.randn(elements) * 1e-3).to(dtype)
    norms = block_norms(gradient)
    assert norms.dtype == torch.float32
    assert norms.double().norm().item() == pytest.approx(gradient.double().norm().item(), rel=1e-5)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_norm_of_non_finite_gradients_is_not_finite(value: float):
    """A step is skipped by this."""
    gradient = torch.ones(100_000)
    gradient[70_000] = value
    assert not block_norms(gradient).norm().isfinite()


def test_norm_of_a_non_contiguous_matrix():
    """Gradients of a matrix product are transposed now and then."""
    gradient = torch.randn(300, 400).t()
    assert block_norms(gradient).norm().item() == pytest.approx(gradient.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("padding", [0, 2])
def test_aligned_parameters_are_left_to_deepspeed(padding: int, run_ranks) -> None:
    """It looks for a gradient by a number that counts the padding, as --log-num-zeros-in-grad does."""
    assert run_ranks(1, copies_once, padding) == [not padding]


def copies_once(padding: int) -> bool:
    optimizer = object.__new__(ZeroOptimizer)
    vars(optimizer).update(dict.fromkeys(("partition_gradients", "cpu_offload", "overlap_comm"), False))
    vars(optimizer).update(dp_process_group=None, round_robin_bit16_padding=[[0, 0], [padding, 0]])
    return optimizer._copies_gradients_once


STEPS = "--train-iters 3 --batch-size 2 --gas 2 --clip-grad 0.4 --eval-iters 0 --zero-stage 1"
LAYOUTS = ["--bf16", "--pipe-parallel-size 1"]


def test_gradients_of_one_rank_are_copied_once(run_ranks_once, programs: Programs, tmp_path: Path) -> None:
    """Losses, norms and clipped updates are those of DeepSpeed's own way, which fills a bucket."""
    common = [*map(str, (*TINY_MODEL, *programs.data_arguments)), *STEPS.split()]
    (buckets,) = run_ranks_once(1, train_both_ways, common, LAYOUTS, tmp_path)
    assert buckets == [(True, False)] * len(LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        own, replaced = (read_metrics(tmp_path / f"{number}-{way}") for way in (0, 1))
        for name in ("lm_loss", "grad_norm"):
            theirs = [line[name] for line in own]
            assert [line[name] for line in replaced] == pytest.approx(theirs, rel=1e-4), f"{name}, {layout}"


def train_both_ways(common: list[str], layouts: list[str], folder: Path) -> list[tuple[bool, ...]]:
    """Of each layout: whether a bucket was filled, as DeepSpeed is, and as it is corrected."""
    from support.training import pretrain

    filled: list[bool] = []

    class Watched(DeepSpeedZeroOptimizer):
        def average_tensor(self, *tensors) -> None:
            filled.append(True)
            super().average_tensor(*tensors)

    class Uncorrected(Watched):
        def remove_unused_hooks(self) -> None:
            pass

    class Corrected(ZeroOptimizer, Watched):
        pass

    found = []
    for number, layout in enumerate(layouts):
        buckets = []
        for way, kind in enumerate((Uncorrected, Corrected)):
            filled.clear()
            zero.ZeroOptimizer = kind
            code, output = pretrain([*common, *layout.split(), "--metrics-file", str(folder / f"{number}-{way}")])
            assert code == 0, output
            buckets.append(bool(filled))
        found.append(tuple(buckets))
    return found
