"""The peers of a training step: GPT-2 in plain torch, and transformers' GPT2LMHeadModel, in a plain loop.

b batch, s sequence, h hidden, n heads, d size of a head, v vocabulary
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measures.shapes import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape


class BareBlock(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h]."""

    def __init__(self, shape: Shape):
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, h = hidden.shape
        query, key, value = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(hidden)).split(h, dim=2)
        )
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(context.transpose(1, 2).reshape(b, s, h))
        return hidden + self.down(F.gelu(self.up(self.norm_2(hidden))))


class BareGPT2(nn.Module):
    """GPT-2 as one would write it on an afternoon: tokens [b, s], labels [b, s] -> loss."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.Sequential(*(BareBlock(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.hidden)
        for weight in (self.words.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        logits = F.linear(self.norm(self.blocks(hidden)), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def transformers_gpt2(shape: Shape, attention: str) -> nn.Module:
    """transformers' GPT-2 of that shape without dropout; its loss by ``forward(tokens, labels)``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.sequence, n_embd=shape.hidden, n_layer=shape.layers,
        n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(config)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.model(tokens).logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Loss()


class WithWeights(nn.Module):
    """The suite's model for a plain loop: tokens [b, s], labels [b, s] -> loss, the mean over tokens."""

    def __init__(self, model: nn.Module, labels: Tensor):
        super().__init__()
        self.model, self.weights = model, torch.full(labels.shape, 1 / labels.numel(), device=labels.device)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(tokens, (labels, self.weights))


def plain_step(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    bf16: bool = False,
    fp16: bool = False,
    micro_batches: int = 1,
) -> Callable[[], None]:
    """One step of a plain loop: forward, backward, clip, fused AdamW.

    Half precision is autocast over fp32 weights, with torch's loss scaling in fp16.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    device = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(device, enabled=fp16)
    dtype = torch.float16 if fp16 else torch.bfloat16

    def step() -> None:
        for _ in range(micro_batches):
            tokens, labels = next(batches)
            with torch.autocast(device, dtype, enabled=bf16 or fp16):
                loss = model(tokens, labels) / micro_batches
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
