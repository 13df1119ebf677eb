"""Training in FP8: kept weights are those of the step, and frozen weights of adapters are quantized once."""

from pathlib import Path
from unittest.mock import patch

import pytest
from support.layouts import layout
from support.programs import Programs, read_metrics
from support.ranks import RankPools
from support.training import RankTraining, pretrain

SETTINGS = (
    "--train-iters 3 --batch-size 2 --global-batch-size 8 --eval-iters 1 --eval-interval 2"
    " --bf16 --fp8-format hybrid --fp8-min-size 16"
).split()
LAYOUTS = [
    "dp2 zero3",
    "tp2 zero1 --fp8-recipe rowwise --batch-size 4",
    "tp2 sp zero1 overlap recompute --batch-size 4",
    "pp2 dualpipev zero1 in-place --gas 4",
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_kept_weights_change_nothing(_rank_pools: RankPools, programs: Programs, tmp_path: Path, name: str) -> None:
    """Each weight is quantized once in a step, and the evaluation and the step after it use the new one."""
    processes, flags = layout(name)
    counts, metrics = [], []
    for run in (keeping, keeping_nothing):
        train, file = RankTraining(_rank_pools.run_once, programs.data_arguments, run), tmp_path / run.__name__
        counts.append(int(train(processes, *SETTINGS, *flags.split(), "--metrics-file", file)))
        metrics.append([line.get("lm_loss", line.get("validation_loss")) for line in read_metrics(file)])
    assert metrics[0] == metrics[1] and len(metrics[0]) == 6
    if "zero3" in name:
        assert counts[0] == counts[1], "weights are gathered, and quantized, for each call"
    else:  # in each of three steps, and in the test after the last one, which has no backward pass
        assert counts[0] == (7 if "rowwise" in name else 4) < counts[1]


def test_frozen_weights_are_quantized_once(_rank_pools: RankPools, programs: Programs) -> None:
    train = RankTraining(_rank_pools.run_once, programs.data_arguments, keeping)
    assert train(1, *SETTINGS, "--lora-rank", "4", "--zero-stage", "2") == "1"


def keeping(words: list[str]) -> tuple[int, str]:
    """Train; the number of quantizations of each weight in place of the output."""
    return _counting(words)


def keeping_nothing(words: list[str]) -> tuple[int, str]:
    """The same without keeping quantized weights."""
    from megatron.ops.fp8 import Fp8LinearKernel

    with patch.object(Fp8LinearKernel, "keeps_weights", property(lambda kernel: False, lambda kernel, value: None)):
        return _counting(words)


def _counting(words: list[str]) -> tuple[int, str]:
    from megatron.ops.fp8 import Fp8LinearKernel

    kernels: list[Fp8LinearKernel] = []
    make = Fp8LinearKernel.__init__

    def made(kernel: Fp8LinearKernel, *arguments: object, **options: object) -> None:
        make(kernel, *arguments, **options)
        kernels.append(kernel)

    with patch.object(Fp8LinearKernel, "__init__", made):
        code, _ = pretrain(words)
    counts = {kernel.quantizations for kernel in kernels}
    assert counts and (len(counts) == 1 or not kernels[0].keeps_weights), "or a layer that has no chunks does it less"
    return code, str(max(counts))
