"""Decoding: how the next token is chosen, by sampling or beam search.

v vocabulary
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.tools.inference.batches import decoding_batch
from megatron.tools.inference.model import LanguageModel

NOT_FINITE = -1
"""In place of the next token where logits are not finite."""
_LEAST_TEMPERATURE = 1e-30
"""Divided by less, logits are infinite; by this, all but the most likely token have the probability 0 already."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, applied in this order: penalties, temperature, top-k, top-p, min-p."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """Sample among the k most likely tokens; 0 is all."""
    top_p: float = 0.0
    """Sample among the most likely tokens whose probabilities total p; 0 is all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that the sequence has already are less likely (CTRL, arXiv 1909.05858, section 4.1)."""
    seed: int = 1234
    min_p: float = 0.0
    """Sample among the tokens that are at least p times as likely as the most likely one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion has: once, and for each time."""
    logprobs: int | None = None
    """The most likely tokens to return with each token and its log-probability; None returns neither."""


def sample_generator(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """The random generator of one sample, which does not depend on the rest of the batch."""
    digest = hashlib.sha256(repr((seed, sample, list(prompt))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


class Row(NamedTuple):
    """What the next token of a sequence depends on besides its logits."""

    sampling: Sampling
    generator: np.random.Generator
    previous: Sequence[int] = ()
    """The tokens that the sequence has."""
    generated: Sequence[int] = ()
    """Those of the completion."""


def choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The next token of each row, from logits [b, v] on the CPU, which are not modified.

    NOT_FINITE where the logits are not finite.
    """
    return [_choose_one(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]


class Logprobs(NamedTuple):
    """Log-probabilities of a token, before temperature and penalties."""

    chosen: float
    top: Sequence[tuple[int, float]]
    """The most likely tokens, with theirs."""


def logprobs(logits: Tensor, token: int, most: int) -> Logprobs:
    """The log-probability of a token, and the ``most`` likely ones, from logits [v]."""
    scores = logits.float().log_softmax(-1)
    best = scores.topk(min(most, len(scores)))
    return Logprobs(float(scores[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _choose_one(logits: Tensor, row: Row) -> int:
    sampling = row.sampling
    scores = penalized(logits, row.previous, sampling.repetition_penalty)
    if row.generated and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = torch.tensor(row.generated).unique(return_counts=True)
        scores = scores.index_add(0, tokens, -sampling.presence_penalty - sampling.frequency_penalty * counts)
    if sampling.greedy:
        best = int(scores.argmax())  # the first NaN, if there is one
        return best if scores[best].isfinite() else NOT_FINITE
    scores = scores / max(sampling.temperature, _LEAST_TEMPERATURE)
    index = torch.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        # In the order of the vocabulary, so that rounding errors do not give random numbers to other tokens.
        index = scores.topk(sampling.top_k, sorted=False).indices.sort().values
    probabilities = scores[index].softmax(-1)
    if probabilities[0].isnan():
        return NOT_FINITE
    if 0 < sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    if sampling.min_p:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
    return int(index[_draw(probabilities, row.generator)])


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Probabilities [v], 0 for all but the most likely tokens that total ``top_p``."""
    values, index = probabilities.sort(descending=True)
    within = values.cumsum(-1) - values <= top_p
    return torch.zeros_like(probabilities).index_copy_(0, index[within], values[within])


def _draw(probabilities: Tensor, generator: np.random.Generator) -> int:
    """A random index, with probabilities [v] that need not total 1.

    The index with the least exponential random number of that rate: an error in the last bits of a probability changes
    the index only if two numbers are equal but for these bits. (A number within the sum of probabilities would move
    with the errors of all.)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return int((np.log(generator.random(len(probabilities))) / probabilities.numpy()).argmax())


def penalized(scores: Tensor, previous: Sequence[int], penalty: float) -> Tensor:
    """Scores [v]; of the tokens in ``previous``, divided by ``penalty`` if positive, else multiplied by it."""
    if penalty == 1.0 or not previous:
        return scores
    index = torch.tensor(sorted(set(previous)))
    old = scores[index]
    return scores.index_copy(0, index, torch.where(old > 0, old / penalty, old * penalty))


@dataclass(frozen=True)
class BeamSearch:
    """Beam search parameters."""

    number: int
    """Beams kept at each step, and continuations returned."""
    length_penalty: float = 1.0
    """Scores are divided by length to this power; above 0 it favors longer texts."""
    repetition_penalty: float = 1.0
    """As in Sampling, applied to log-probabilities."""


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt, with its score."""

    tokens: tuple[int, ...]
    """Including the end of document, if there is one."""
    score: float
    """Sum of log-probabilities, divided by the number of tokens to the power of ``length_penalty``."""


def search_beams(
    model: LanguageModel,
    prompt: Sequence[int],
    beams: BeamSearch,
    *,
    new_tokens: int,
    context: int,
    eod: int,
    use_cache: bool = True,
) -> list[Hypothesis]:
    """The most likely continuations, up to the end of document or ``new_tokens`` tokens, best first.

    The search ends when no beam at its current length could still be among them.
    """
    batch = decoding_batch(model, [prompt], context=context, use_cache=use_cache)
    begin = len(batch.sequences[0])
    sums = torch.zeros(1)
    done: list[Hypothesis] = []
    for length in range(1, new_tokens + 1):
        scores = batch.logits.log_softmax(-1)  # [k, v], and [1, v] for the first token
        scores = torch.stack(
            [
                penalized(row, previous, beams.repetition_penalty)
                for row, previous in zip(scores, batch.sequences, strict=True)
            ]
        )
        totals = (sums.unsqueeze(1) + scores).flatten()
        # At most one token of each beam ends it, so that twice as many candidates leave enough to continue.
        best = totals.topk(min(2 * beams.number, totals.numel()))
        flat = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        candidates = [(total, *divmod(index, scores.size(1))) for total, index in flat]
        is_last = length == new_tokens
        for total, row, token in candidates[: beams.number]:
            if token == eod or is_last:
                tokens = (*batch.sequences[row][begin:], token)
                done.append(Hypothesis(tokens, total / length**beams.length_penalty))
        done = sorted(done, key=lambda hypothesis: -hypothesis.score)[: beams.number]
        alive = [candidate for candidate in candidates if candidate[2] != eod][: beams.number]
        if is_last or (len(done) == beams.number and done[-1].score >= alive[0][0] / length**beams.length_penalty):
            break
        sums = torch.tensor([total for total, _, _ in alive])
        batch.select([row for _, row, _ in alive])
        batch.append([token for _, _, token in alive])
    return done
