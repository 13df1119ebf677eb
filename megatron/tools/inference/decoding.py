"""How the next token is chosen.

v vocabulary
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.tools.inference.model import Continuation, LanguageModel


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


@dataclass(frozen=True)
class Beams:
    """How to search."""

    number: int
    """Sequences that are followed at once, and found."""
    length_penalty: float = 1.0
    """The power of its length by which the score of a text is divided; above 0 longer texts gain."""
    repetition_penalty: float = 1.0
    """As in Sampling, on the logarithms of probabilities."""


@dataclass(frozen=True)
class Hypothesis:
    """Tokens behind the prompt, and how likely they are."""

    tokens: tuple[int, ...]
    """The end of document included, where they come to it."""
    score: float
    """Sum of the logarithms of their probabilities, over their number to the power of ``length_penalty``."""


def search_beams(
    model: LanguageModel,
    prompt: Sequence[int],
    beams: Beams,
    *,
    room: int,
    window: int,
    eod: int,
    keeps: bool = True,
) -> list[Hypothesis]:
    """The best continuations to the end of document or to ``room`` tokens, best first.

    It ends when no beam, as long as it is now, could still be among them.
    """
    batch = Continuation(model, [prompt], window=window, room=room, keeps=keeps)
    sums = torch.zeros(1)
    done: list[Hypothesis] = []
    for length in range(1, room + 1):
        scores = batch.logits.log_softmax(-1)  # [k, v], and [1, v] for the first token
        scores = torch.stack(
            [penalized(row, seen, beams.repetition_penalty) for row, seen in zip(scores, batch.sequences, strict=True)]
        )
        totals = (sums.unsqueeze(1) + scores).flatten()
        # At most one token of each beam ends it, so that twice as many leave enough to go on with.
        best = totals.topk(min(2 * beams.number, totals.numel()))
        places = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        candidates = [(total, *divmod(place, scores.size(1))) for total, place in places]
        is_last = length == room
        for total, row, token in candidates[: beams.number]:
            if token == eod or is_last:
                tokens = (*batch.sequences[row][len(prompt) :], token)
                done.append(Hypothesis(tokens, total / length**beams.length_penalty))
        done = sorted(done, key=lambda hypothesis: -hypothesis.score)[: beams.number]
        going = [candidate for candidate in candidates if candidate[2] != eod][: beams.number]
        if is_last or (len(done) == beams.number and done[-1].score >= going[0][0] / length**beams.length_penalty):
            break
        sums = torch.tensor([total for total, _, _ in going])
        batch.select([row for _, row, _ in going])
        batch.append([token for _, _, token in going])
    return done
