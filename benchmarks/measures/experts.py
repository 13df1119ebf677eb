"""Mixture of experts: a step compared with a plain loop over the experts, and expert parallelism of two ranks.

The loop is what one writes without this project: for each expert, the tokens that chose it, two products, and a sum. It
replaces the layer in this project's model, with the same weights, so that tokens go to the same experts and none is
dropped; the model is trained by torch's AdamW. Two ranks that divide the experts are compared with a step that
communicates nothing, with as many experts on a rank, plus the all-to-alls by themselves.

b batch, s sequence, h hidden, E experts, k chosen experts, f inside an expert
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.comparing import Comparison, Quantity, Result, Times, alternate
from benchmarks.measures.peers import WithWeights, plain_step
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.build import build_module
from megatron.launch.distributed import distributed
from megatron.model.moe import ParallelMoE
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class ExpertShape(Shape):
    """The same of a mixture of experts."""

    experts: int
    chosen: int
    ffn: int

    @property
    def words(self) -> list[str]:
        """Flags of ``pretrain_gpt2.py``."""
        experts = f"--num-experts {self.experts} --moe-router-topk {self.chosen} --moe-ffn-hidden-size {self.ffn}"
        return [*super().words, *experts.split(), "--disable-bias-linear"]

    @property
    def rows(self) -> int:
        """Rows that experts compute in a layer: one for each token and choice."""
        return self.tokens * self.chosen

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.chosen} of {self.experts} experts of {self.ffn}"


SIZES = {"layers": 4, "hidden": 384, "heads": 6, "sequence": 256, "vocabulary": 512, "chosen": 2, "ffn": 768}
SHAPE = ExpertShape(**SIZES, batch=2, experts=8)
RANKS = 2
OF_A_RANK = ExpertShape(**SIZES, batch=2, experts=8 // RANKS)
"""The model with as many experts as a rank holds, and the work of a rank if they are equally used."""
AT_THE_LIMIT = 1 / 0.9


def measure(rounds: int) -> list[Result]:
    """One process: a step, and the layer by itself; two: a step beside what it consists of."""
    silence_known_warnings()
    torch.manual_seed(1)
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))
    with distributed(run_of(SHAPE).parallel) as layout, deepspeed_silenced(verbose=False):
        step = alternate(
            {
                "suite": engine_step(run_of(SHAPE), layout, tokens, labels),
                "loop": plain_step(WithWeights(with_loops(layout), labels), repeat((tokens, labels))),
            },
            rounds,
            warm_up=3,
        )
        layer = ParallelMoE(run_of(SHAPE).model, layout, layer_number=1)
        alone = alternate({"suite": passes(layer), "loop": passes(Loop(layer))}, rounds, warm_up=3)
    peer = "a loop over experts, in torch"
    return [
        Comparison(f"EP 1, a step: {SHAPE}", peer, step["suite"], step["loop"], SHAPE.tokens, "tokens", 0.95),
        Comparison("EP 1, forward and backward of a layer", peer, *alone.values(), SHAPE.tokens, "tokens", 0.95),
        *_of_two_ranks(rounds),
    ]


def _of_two_ranks(rounds: int) -> list[Result]:
    found = measured_by_ranks(RANKS, "experts_ranks", str(rounds), OMP_NUM_THREADS="1")
    times = {name: Times(**each) for name, each in found.items()}
    limits = [times[name].wall for name in ("no communication", "all-to-alls", "all-reduce")]
    predicted = [sum(parts) for parts in zip(*limits, strict=True)]
    share = sum(times["all-to-alls"].wall) / sum(predicted)
    size = 4 * SHAPE.rows * SHAPE.hidden
    what = (
        f"EP {RANKS}, a step: {4 * SHAPE.layers} all-to-alls of {size / 1e6:.1f} MB are {share:.0%} of the prediction"
    )
    return [
        Quantity(what, "no communication, and the collectives", times["EP"].wall, predicted, "s", most=AT_THE_LIMIT)
    ]


class Loop(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h]: the experts of ``layer``, one after the other."""

    def __init__(self, layer: ParallelMoE):
        super().__init__()
        self.router, self.chosen = nn.Parameter(layer.router.weight.detach().clone()), layer.router.chosen
        self.up, self.down = (
            nn.ParameterList(matrix.clone() for matrix in stacked.weight.detach())
            for stacked in (layer.experts.dense_h_to_4h, layer.experts.dense_4h_to_h)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        top, chosen = F.linear(x, self.router).topk(self.chosen, dim=-1)
        weights, y = top.softmax(-1), torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, choice = torch.where(chosen == number)
            rows = F.linear(F.gelu(F.linear(x[token], up)), down)
            y = y.index_add(0, token, rows * weights[token, choice].unsqueeze(1))
        return y.view(hidden.shape)


def with_loops(layout: ParallelLayout) -> nn.Module:
    """The model with a loop in place of each mixture of experts."""
    model = build_module(run_of(SHAPE), layout)
    for layer in model.modules():
        if isinstance(layer, ParallelTransformerLayer):
            layer.mlp = Loop(layer.mlp)
    return model


def passes(layer: nn.Module) -> Callable[[], Any]:
    """Forward and backward of a layer."""
    hidden = torch.randn(SHAPE.batch, SHAPE.sequence, SHAPE.hidden, requires_grad=True)
    grad = torch.randn_like(hidden)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(hidden).backward(grad)

    return step
