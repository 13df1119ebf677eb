"""How the next token is chosen.

v vocabulary
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """What a token's chance depends on, beside the model. Applied in this order: penalty, temperature, k, p."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """Choose among this many; 0 is all."""
    top_p: float = 0.0
    """Choose among the likeliest that together hold this probability; 0 is all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the sequence has already are less likely (CTRL, arXiv 1909.05858, section 4.1)."""
    seed: int = 1234


def random_stream_of(seed: int, prompt: Sequence[int], sample: int) -> torch.Generator:
    """The random numbers of one sample: whatever else is in the batch changes nothing."""
    digest = hashlib.sha256(repr((seed, sample, list(prompt))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator, seen: Sequence[int] = ()) -> int:
    """A token from logits [v], which are not changed, where the sequence has the tokens ``seen``."""
    logits = penalized(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p:
        ordered, index = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered > sampling.top_p
        probabilities[index[beyond]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def penalized(scores: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Scores [v], those of the tokens ``seen`` divided by ``penalty`` where above 0, and else multiplied by it."""
    if penalty == 1.0 or not seen:
        return scores
    index = torch.tensor(sorted(set(seen)))
    theirs = scores[index]
    return scores.index_copy(0, index, torch.where(theirs > 0, theirs / penalty, theirs * penalty))
