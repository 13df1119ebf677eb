"""The norm of a gradient, beside the same in fp64; and steps without the copies of gradients that DeepSpeed makes."""

import pytest
import torch
from support.programs import read_metrics
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.engines.gradient_norm import block_norms, sums_of_squares


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


UNTIED = "--untie-embeddings-and-output-weights"  # the ends of a model in one process add up their gradients in bf16
TENSOR = "--model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("shared", "processes", "flags", "bound"),
    [
        ("", 2, TENSOR, 3e-3),
        ("--pipe-parallel-size 1", 2, TENSOR, 3e-3),
        (UNTIED, 2, "--zero-stage 1", 1e-4),
        (UNTIED, 4, "--pipe-parallel-size 2 --ddp-bucket-size 5000", 1e-4),
    ],
)
def test_sums_in_fp32_lose_nothing(train_in_ranks, tmp_path, shared: str, processes: int, flags: str, bound) -> None:
    """In bf16 on tensor-parallel and data-parallel ranks, beside one process with the same micro-batches."""
    found = []
    for name, ranks, more in (("one", 1, ""), ("ranks", processes, flags)):
        settings = "--bf16 --grad-accum-dtype fp32 --train-iters 2 --batch-size 2 --global-batch-size 8 --eval-iters 0"
        words = f"{settings} --attention-dropout 0 --hidden-dropout 0 --metrics-file {tmp_path / name} {shared} {more}"
        train_in_ranks(ranks, *words.split())
        found.append([line["grad_norm"] for line in read_metrics(tmp_path / name)])
    assert len(found[0]) == 2 and found[1] == pytest.approx(found[0], rel=bound)


class Launched(TorchDispatchMode):
    """While inside, notes the operations that are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_device_launches_one_kernel_for_the_norms_of_many_gradients() -> None:
    """Such as the biases of all layers, which a tensor-parallel rank counts one by one, without the norms' weights."""
    gradients = [(number % 5 == 0, torch.ones(number, device="meta")) for number in range(1, 50)]
    with Launched() as launched:
        sums_of_squares(gradients, torch.device("meta"))
    assert launched.names.count("aten::_foreach_norm") == 2, "of those of experts, and of the others"
    assert len(launched.names) < 15


def test_sums_of_squares_are_of_experts_and_of_the_others() -> None:
    gradients = [(False, torch.tensor([1.0, 2.0])), (True, torch.tensor([3.0])), (False, torch.tensor([4.0]))]
    assert sums_of_squares(gradients, torch.device("cpu")).tolist() == pytest.approx([21, 9])
    assert sums_of_squares([], torch.device("cpu")).tolist() == [0, 0]
