"""Continue a text, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.model.gpt2_model import GPT2Model


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """Choose among this many; 0 is all."""
    top_p: float = 0.0
    """Choose among the likeliest that together hold this probability; 0 is all."""
    seed: int = 1234


@torch.no_grad()
def generate(
    model: GPT2Model, prompt: list[int], *, length: int, context: int, eod: int, vocab_size: int, sampling: Sampling
) -> Iterator[int]:
    """New tokens behind ``prompt``, until ``length`` tokens in all or the end of document.

    The model sees the last ``context`` tokens.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    tokens = list(prompt)
    while len(tokens) < length:
        window = torch.tensor([tokens[-context:]], device=device)
        logits = model(window)[0, -1, :vocab_size].float()
        token = int(choose(logits, sampling, generator))
        if token == eod:
            return
        tokens.append(token)
        yield token


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token from logits [v]."""
    if sampling.greedy:
        return logits.argmax()
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p:
        ordered, index = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered > sampling.top_p
        probabilities[index[beyond]] = 0.0
    return torch.multinomial(probabilities, 1, generator=generator)
