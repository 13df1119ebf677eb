"""A training step of one process: this project's engine, a plain torch model and GPT-2 of transformers.

The plain model is in ``peers.py``; transformers runs with torch's fused attention. The others have a separate process,
in alternation with this project's. All process the same number of tokens, clip gradients at 1 and step with AdamW. bf16
is autocast for the others, and fp32 master weights with ZeRO 1 here.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import repeat
from typing import Any

import torch

from benchmarks.comparing import Comparison, alternate
from benchmarks.measures.elsewhere import Elsewhere
from benchmarks.measures.peers import BareGPT2, plain_step, transformers_gpt2
from benchmarks.measures.shapes import SHAPES, Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout

PEERS = {"bare torch": BareGPT2, "transformers": partial(transformers_gpt2, attention="sdpa")}


def measure(rounds: int, sizes: Sequence[str] = tuple(SHAPES)) -> list[Comparison]:
    """Each of ``sizes``, in fp32 and in bf16."""
    silence_known_warnings()
    torch.manual_seed(1)
    with distributed(run_of(SHAPES["A"]).parallel) as layout, deepspeed_silenced(verbose=False):
        return [
            comparison
            for name in sizes
            for dtype in ("fp32", "bf16")
            for comparison in _compared(name, SHAPES[name], dtype, rounds, layout)
        ]


def _compared(name: str, shape: Shape, dtype: str, rounds: int, layout: ParallelLayout) -> list[Comparison]:
    bf16 = dtype == "bf16"
    tokens, labels = (torch.randint(shape.vocabulary, (shape.batch, shape.sequence)) for _ in range(2))
    flags = ("--bf16", "--zero-stage", "1") if bf16 else ()
    suite = engine_step(run_of(shape, *flags), layout, tokens, labels)
    with closing(Elsewhere(_peers, shape, bf16)) as peers:
        times = alternate({"suite": suite} | {name: peers.way(name) for name in PEERS}, rounds, warm_up=3)
    ours = times.pop("suite")
    return [
        Comparison(f"{name} {dtype}: {shape}", peer, ours, theirs, shape.tokens, "tokens")
        for peer, theirs in times.items()
    ]


def _peers(shape: Shape, bf16: bool) -> dict[str, Callable[[], Any]]:
    batches = repeat(tuple(torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence))))
    return {name: plain_step(build(shape), batches, bf16=bf16) for name, build in PEERS.items()}
