"""The likeliest text behind a prompt, as far as a search of a few beams finds it.

k beams, v vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.inference.continuation import Continuation, LanguageModel
from megatron.inference.sampling import penalized


@dataclass(frozen=True)
class Hypothesis:
    """Tokens behind the prompt, and how likely they are."""

    tokens: tuple[int, ...]
    """The end of document included, where they come to it."""
    score: float
    """Sum of the logarithms of their probabilities, over their number to the power of the length penalty."""


def search_beams(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    beams: int,
    longest: int,
    window: int,
    eod: int,
    length_penalty: float = 1.0,
    repetition_penalty: float = 1.0,
    keeps: bool = True,
) -> list[Hypothesis]:
    """The best ``beams`` continuations to the end of document or to ``longest`` tokens with the prompt, best first.

    It ends when no beam, as long as it is now, could still be among them.
    """
    batch = Continuation(model, [prompt], window=window, longest=longest, keeps=keeps)
    sums = torch.zeros(1)
    done: list[Hypothesis] = []
    for length in range(1, longest - len(prompt) + 1):
        scores = batch.logits.log_softmax(-1)  # [k, v], and [1, v] for the first token
        scores = torch.stack(
            [penalized(row, seen, repetition_penalty) for row, seen in zip(scores, batch.sequences, strict=True)]
        )
        totals = (sums.unsqueeze(1) + scores).flatten()
        # At most one token of each beam ends it, so that twice as many leave enough to go on with.
        best = totals.topk(min(2 * beams, totals.numel()))
        places = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        candidates = [(total, *divmod(place, scores.size(1))) for total, place in places]
        is_last = length == longest - len(prompt)
        for total, row, token in candidates[:beams]:
            if token == eod or is_last:
                tokens = (*batch.sequences[row][len(prompt) :], token)
                done.append(Hypothesis(tokens, total / length**length_penalty))
        done = sorted(done, key=lambda hypothesis: -hypothesis.score)[:beams]
        going = [candidate for candidate in candidates if candidate[2] != eod][:beams]
        if is_last or (len(done) == beams and done[-1].score >= going[0][0] / length**length_penalty):
            break
        sums = torch.tensor([total for total, _, _ in going])
        batch.select([row for _, row, _ in going])
        batch.append([token for _, _, token in going])
    return done
