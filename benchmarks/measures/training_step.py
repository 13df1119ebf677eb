"""A training step of one process: this project's engine, a plain torch model and GPT-2 of transformers.

The plain model is in ``peers.py``; transformers runs with both of its attention implementations. The others have a
separate process, in alternation with this project's. All process the same number of tokens, clip gradients at 1 and
step with AdamW. bf16 is autocast for the others, and fp32 master weights with ZeRO 1 here. The same rounds measure
which share of the rate of a matrix product of the same type a step reaches, and the limit: torch's operators for such a
step by themselves (``operators.py``).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import repeat
from typing import Any

import torch

from benchmarks.comparing import Comparison, Quantity, Result, Times, alternate
from benchmarks.measures.elsewhere import Elsewhere
from benchmarks.measures.operators import operators_step
from benchmarks.measures.peers import BareGPT2, plain_step, transformers_gpt2
from benchmarks.measures.shapes import SHAPES, Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.products import product

PEERS = {
    "bare torch": BareGPT2,
    "transformers sdpa": partial(transformers_gpt2, attention="sdpa"),
    "transformers eager": partial(transformers_gpt2, attention="eager"),
}
LIMIT = "operators alone"
GEMM, PRODUCTS = 1024, 8
GOALS = {"bare": 1.05, "transformers": 1.10}
SHARES = {"fp32": {"A": 0.90, "B": 0.75, "C": 0.90}, "bf16": {"A": 0.65, "B": 0.45, "C": 0.45}}
"""Of the rate of a matrix product."""


def measure(rounds: int, sizes: Sequence[str] = tuple(SHAPES)) -> list[Result]:
    """Each of ``sizes``, in fp32 and in bf16."""
    silence_known_warnings()
    torch.manual_seed(1)
    comparisons = []
    parallel = run_of(SHAPES["A"]).parallel
    with distributed(parallel) as layout, deepspeed_silenced(verbose=False):
        for name in sizes:
            for dtype in ("fp32", "bf16"):
                comparisons += _compared(name, SHAPES[name], dtype, rounds, layout)
    return comparisons


def _compared(name: str, shape: Shape, dtype: str, rounds: int, layout: ParallelLayout) -> list[Result]:
    bf16 = dtype == "bf16"
    tokens, labels = (torch.randint(shape.vocabulary, (shape.batch, shape.sequence)) for _ in range(2))
    flags = ("--bf16", "--zero-stage", "1") if bf16 else ()
    ways: dict[str, Callable[[], Any]] = {
        "suite": engine_step(run_of(shape, *flags), layout, tokens, labels),
        "GEMM": _products(torch.bfloat16 if bf16 else torch.float32),
        LIMIT: operators_step(shape, bf16=bf16),
    }
    with closing(Elsewhere(_peers, shape, bf16)) as peers:
        times = alternate(ways | {name: peers.way(name) for name in PEERS}, rounds, warm_up=3)
    ours, products, alone = times.pop("suite"), times.pop("GEMM"), times.pop(LIMIT)
    what = f"{name} {dtype}: {shape}"
    return [
        *(
            Comparison(what, peer, ours, theirs, shape.tokens, "tokens", GOALS[peer.partition(" ")[0]])
            for peer, theirs in times.items()
        ),
        _share(what, shape, ours, products, SHARES[dtype][name]),
        Comparison(what, LIMIT, ours, alone, shape.tokens, "tokens", is_limit=True),
    ]


def _peers(shape: Shape, bf16: bool) -> dict[str, Callable[[], Any]]:
    batches = repeat(tuple(torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence))))
    return {name: plain_step(build(shape), batches, bf16=bf16) for name, build in PEERS.items()}


def _products(dtype: torch.dtype) -> Callable[[], Any]:
    """By the faster library of torch's."""
    left, right = torch.randn(2, GEMM, GEMM).to(dtype)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            product(left, right)

    return multiply


def _share(what: str, shape: Shape, step: Times, products: Times, goal: float) -> Quantity:
    """By CPU time."""
    rates = (
        [shape.flops / seconds for seconds in step.cpu],
        [PRODUCTS * 2 * GEMM**3 / seconds for seconds in products.cpu],
    )
    return Quantity(what, f"a matrix product, {GEMM} x {GEMM}", *rates, "FLOP/s", least=goal)
