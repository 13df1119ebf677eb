"""A training step of a Llama on one process: this project's engine, a plain torch model and Llama of transformers.

The plain model is written as in the papers, with the products that a careful author would fuse; transformers runs with
both of its attention implementations. Loop, clipping and optimizer are those of ``training_step``, and so is the limit:
torch's operators for such a step by themselves (``llama_operators.py``).

b batch, s sequence, h hidden, n heads, g query groups, d size of a head
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.comparing import Comparison, Result, alternate
from benchmarks.measures.elsewhere import Elsewhere
from benchmarks.measures.llama_operators import llama_operators_step, rotations
from benchmarks.measures.peers import plain_step
from benchmarks.measures.shapes import LLAMA_SHAPES as SHAPES
from benchmarks.measures.shapes import LlamaShape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout

LIMIT = "operators alone"
GOALS = {"bare": 1.0, "transformers": 1.10}


def measure(rounds: int, sizes: Sequence[str] = tuple(SHAPES)) -> list[Result]:
    """Each of ``sizes``, in fp32 and in bf16."""
    silence_known_warnings()
    torch.manual_seed(1)
    results: list[Result] = []
    with distributed(run_of(SHAPES["A"]).parallel) as layout, deepspeed_silenced(verbose=False):
        for name in sizes:
            for dtype in ("fp32", "bf16"):
                results += _compared(f"{name} {dtype}: {SHAPES[name]}", SHAPES[name], dtype == "bf16", rounds, layout)
    return results


def _compared(what: str, shape: LlamaShape, bf16: bool, rounds: int, layout: ParallelLayout) -> list[Result]:
    tokens, labels = (torch.randint(shape.vocabulary, (shape.batch, shape.sequence)) for _ in range(2))
    flags = ("--bf16", "--zero-stage", "1") if bf16 else ()
    own = {
        "suite": engine_step(run_of(shape, *flags), layout, tokens, labels),
        LIMIT: llama_operators_step(shape, bf16=bf16),
    }
    with closing(Elsewhere(_peers, shape, bf16)) as peers:
        times = alternate(own | {name: peers.way(name) for name in PEERS}, rounds, warm_up=3)
    ours, alone = times.pop("suite"), times.pop(LIMIT)
    return [
        *(
            Comparison(what, peer, ours, theirs, shape.tokens, "tokens", GOALS[peer.partition(" ")[0]])
            for peer, theirs in times.items()
        ),
        Comparison(what, LIMIT, ours, alone, shape.tokens, "tokens", is_limit=True),
    ]


def _peers(shape: LlamaShape, bf16: bool) -> dict[str, Callable[[], Any]]:
    batches = repeat(tuple(torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence))))
    return {name: plain_step(build(shape), batches, bf16=bf16) for name, build in PEERS.items()}


class BareBlock(nn.Module):
    """hidden [b, s, h], rotation [s, d/2] -> hidden [b, s, h]."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        h, d = shape.hidden, shape.hidden // shape.heads
        self.heads, self.groups = shape.heads, shape.groups
        self.norm_1, self.norm_2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
        self.query, self.out = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.key, self.value = (nn.Linear(h, shape.groups * d, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(h, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, h, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        normed = self.norm_1(hidden)
        query, key, value = (part(normed).unflatten(-1, (heads, -1)) for part, heads in (
            (self.query, self.heads), (self.key, self.groups), (self.value, self.groups),
        ))  # fmt: skip
        query, key = _rotated(query, rotation), _rotated(key, rotation)
        context = F.scaled_dot_product_attention(
            *(heads.transpose(1, 2) for heads in (query, key, value)), is_causal=True, enable_gqa=True
        )
        hidden = hidden + self.out(context.transpose(1, 2).flatten(2))
        normed = self.norm_2(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x [b, s, n, d]; pairs of neighbors are complex numbers that ``rotation`` turns (arXiv 2104.09864)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(3).to(x.dtype)


class BareLlama(nn.Module):
    """A Llama as one would write it: tokens [b, s], labels [b, s] -> loss."""

    def __init__(self, shape: LlamaShape):
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(BareBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        nn.init.normal_(self.words.weight, std=0.02)
        self.rotation = rotations(shape)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.rotation)
        logits = F.linear(self.norm(hidden), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _transformers(shape: LlamaShape, attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, max_position_embeddings=shape.sequence, hidden_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
        intermediate_size=shape.ffn, tie_word_embeddings=True, attn_implementation=attention, use_cache=False,
    )  # fmt: skip

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.model(tokens).logits.flatten(0, 1), labels.flatten())

    return Loss()


PEERS = {
    "bare torch": BareLlama,
    "transformers sdpa": partial(_transformers, attention="sdpa"),
    "transformers eager": partial(_transformers, attention="eager"),
}
