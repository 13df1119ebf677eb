"""The likeliest text behind a prompt, as far as a search of a few beams finds it.

k beams, v vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.inference.continuation import Continuation, LanguageModel
from megatron.inference.sampling import penalized


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
