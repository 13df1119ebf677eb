"""The norm of a gradient, beside the same in fp64; and steps without the copies of gradients that DeepSpeed makes."""

import pytest
import torch
from support.programs import read_metrics

from megatron.engines.gradients import block_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (65_537,), (300, 400), (30_000_000,)])
def test_norm_of_blocks_equals_the_full_norm(dtype: torch.dtype, shape: tuple[int, ...]):
    """A single sum of 30 million squares in fp32 is wrong by a thousandth. A matrix is transposed now and then."""
    torch.manual_seed(1)
    gradient = (torch.randn(shape) * 1e-3).to(dtype)
    gradient = gradient.t() if gradient.dim() == 2 else gradient
    norms = block_norms(gradient)
    assert norms.dtype == torch.float32
    for value in (torch.inf, torch.nan):  # by which a step is skipped
        other = gradient.clone()
        other[len(other) * 2 // 3] = value
        assert not block_norms(other).norm().isfinite()
    assert norms.double().norm().item() == pytest.approx(gradient.double().norm().item(), rel=1e-5)


@pytest.mark.parametrize("engine", ["", "--pipe-parallel-size 1"])
def test_sums_in_fp32_count_the_gradients_that_tensor_parallel_ranks_sum(train_in_ranks, tmp_path, engine: str) -> None:
    """In bf16 with TP 2 and sequence parallelism, as on one process."""
    flags = "--model-parallel-size 2 --sequence-parallel"
    expected, found = (metrics(train_in_ranks, tmp_path, n, f"{engine} {more}") for n, more in ((1, ""), (2, flags)))
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=3e-3)


@pytest.mark.parametrize("flags", ["--zero-stage 1", "--pipe-parallel-size 2 --ddp-bucket-size 5000"])
def test_sums_in_fp32_over_data_parallel_ranks_lose_nothing(train_in_ranks, tmp_path, flags: str) -> None:
    """In bf16 beside one process, which adds up the same gradients of micro-batches."""
    untied = "--untie-embeddings-and-output-weights"  # the ends of a model in one process add up theirs in bf16
    processes = 4 if "pipe" in flags else 2
    expected, found = (metrics(train_in_ranks, tmp_path, n, f"{untied} {f}") for n, f in ((1, ""), (processes, flags)))
    for name in ("lm_loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def metrics(train_in_ranks, folder, processes: int, flags: str) -> dict[str, list[float]]:
    """Losses and norms of three steps in bf16 with sums in fp32."""
    settings = "--bf16 --grad-accum-dtype fp32 --train-iters 3 --batch-size 2 --global-batch-size 8 --eval-iters 0"
    words = [*settings.split(), *flags.split(), "--attention-dropout", 0, "--hidden-dropout", 0]
    train_in_ranks(processes, *words, "--metrics-file", folder / str(processes))
    lines = [line for line in read_metrics(folder / str(processes)) if "grad_norm" in line]
    assert len(lines) == 3
    return {name: [line[name] for line in lines] for name in ("lm_loss", "grad_norm")}
