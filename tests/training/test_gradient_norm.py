"""The norm of a gradient, beside the same in fp64; and steps without the copies of gradients that DeepSpeed makes."""

import pytest
import torch
from support.programs import read_metrics

from megatron.engines.gradients import block_norms


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


@pytest.mark.parametrize("engine", ["", "--pipe-parallel-size 1"])
def test_sums_in_fp32_count_the_gradients_that_tensor_parallel_ranks_sum(train_in_ranks, tmp_path, engine: str) -> None:
    """In bf16 with TP 2 and sequence parallelism, as on one process."""
    settings = "--bf16 --zero-stage 1 --grad-accum-dtype fp32 --train-iters 3 --batch-size 2 --gas 2 --eval-iters 0"
    norms = []
    for processes, flags in ((1, ""), (2, "--model-parallel-size 2 --sequence-parallel")):
        folder = tmp_path / str(processes)
        words = [*settings.split(), *engine.split(), *flags.split(), "--attention-dropout", 0, "--hidden-dropout", 0]
        train_in_ranks(processes, *words, "--metrics-file", folder)
        norms.append([line["grad_norm"] for line in read_metrics(folder) if "grad_norm" in line])
    assert len(norms[0]) == 3
    assert norms[1] == pytest.approx(norms[0], rel=3e-3)
