"""Decoding: chooses the next tokens by sampling or beam search.

v vocabulary
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.tools.inference.batches import decoding_batch
from megatron.tools.inference.model import LanguageModel

NOT_FINITE = -1
"""Returned instead of a token if logits are not finite."""
_LEAST_TEMPERATURE = 1e-30
"""Smaller temperatures make logits overflow; at this one, all but the most likely token have probability 0 already."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, applied in this order: penalties, temperature, top-k, top-p, min-p."""

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    """Sample from the k most likely tokens, and those that are as likely as the last of them; 0: from all."""
    top_p: float = 0.0
    """Sample from the most likely tokens whose probabilities total p (nucleus sampling); 0: from all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the sequence become less likely (CTRL, arXiv 1909.05858, section 4.1)."""
    seed: int = 1234
    min_p: float = 0.0
    """Sample from the tokens that are at least p times as likely as the most likely one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the completion: presence once, frequency for each occurrence."""
    logprobs: int | None = None
    """Number of most likely tokens to return with each token and its log-probability; None returns neither."""


def sample_generator(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """The random generator of one sample, which does not depend on the rest of the batch."""
    digest = hashlib.sha256(repr((seed, sample, list(prompt))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


class Row(NamedTuple):
    """Everything that the next token of a sequence depends on, except its logits."""

    sampling: Sampling
    generator: np.random.Generator
    previous: Sequence[int] = ()
    """Tokens of the sequence so far."""
    generated: Sequence[int] = ()
    """Tokens of the completion so far."""


def choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """The next token of each row, from logits [b, v] on the CPU, which are not modified.

    NOT_FINITE for rows whose logits are not finite.
    """
    return [_choose_one(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]


class Logprobs(NamedTuple):
    """Log-probabilities of a token, before temperature and penalties."""

    chosen: float
    top: Sequence[tuple[int, float]]
    """The most likely tokens, with their log-probabilities."""


def logprobs(logits: Tensor, token: int, top: int) -> Logprobs:
    """Log-probabilities of ``token`` and of the ``top`` most likely tokens, from logits [v]."""
    scores = logits.float().log_softmax(-1)
    best = scores.topk(min(top, len(scores)))
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
        # In the order of the vocabulary, so that rounding errors do not assign random numbers to other tokens.
        index = (~(scores < scores.topk(sampling.top_k).values[-1])).nonzero().flatten()  # with NaN, if there is one
    probabilities = scores[index].softmax(-1)
    if probabilities[0].isnan():
        return NOT_FINITE
    if 0 < sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p)
    if sampling.min_p:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
    return int(index[_draw(probabilities, row.generator)])


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Probabilities [v] with all set to 0 except those of the most likely tokens, which total ``top_p``."""
    values, index = probabilities.sort(descending=True)
    within = values.cumsum(-1) - values < top_p
    return torch.zeros_like(probabilities).index_copy_(0, index[within], values[within])


def _draw(probabilities: Tensor, generator: np.random.Generator) -> int:
    """Draw a random index with probabilities [v], which need not total 1.

    Draws an exponential random number with the rate of each probability; the smallest one wins. A rounding error in a
    probability changes the index only if two of these numbers are almost equal. (Inverting the cumulative sum would
    depend on the errors of all probabilities.)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return int((np.log(generator.random(len(probabilities))) / probabilities.numpy()).argmax())


def penalized(scores: Tensor, previous: Sequence[int], penalty: float) -> Tensor:
    """Scores [v] with those of tokens in ``previous`` divided by ``penalty`` if positive, else multiplied by it."""
    if penalty == 1.0 or not previous:
        return scores
    index = torch.tensor(sorted(set(previous)))
    old = scores[index]
    return scores.index_copy(0, index, torch.where(old > 0, old / penalty, old * penalty))


@dataclass(frozen=True)
class BeamSearch:
    """Beam search parameters."""

    number: int
    """Number of beams kept at each step, and of continuations returned."""
    length_penalty: float = 1.0
    """Scores are divided by the length to this power; above 0 it favors longer texts."""
    repetition_penalty: float = 1.0
    """The same as in ``Sampling``, applied to log-probabilities."""


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt, with its score."""

    tokens: tuple[int, ...]
    """Tokens, including the end of document if there is one."""
    score: float
    """Sum of log-probabilities, divided by the number of tokens to the power of ``length_penalty``."""


def search_beams(
    model: LanguageModel,
    prompt: Sequence[int],
    beams: BeamSearch,
    *,
    new_tokens: int,
    context: int,
    ends: Collection[int],
    use_cache: bool = True,
) -> list[Hypothesis]:
    """The most likely continuations, up to one of the ``ends`` or ``new_tokens`` tokens, best first.

    The search ends when no unfinished beam, scored at its current length, is better than the continuations found.
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
        # Each beam has a candidate for each end, so this many candidates leave enough beams to continue.
        best = totals.topk(min((1 + len(ends)) * beams.number, totals.numel()))
        flat = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        candidates = [(total, *divmod(index, scores.size(1))) for total, index in flat]
        is_last = length == new_tokens
        for total, row, token in candidates[: beams.number]:
            if token in ends or is_last:
                tokens = (*batch.sequences[row][begin:], token)
                done.append(Hypothesis(tokens, total / length**beams.length_penalty))
        done = sorted(done, key=lambda hypothesis: -hypothesis.score)[: beams.number]
        alive = [candidate for candidate in candidates if candidate[2] not in ends][: beams.number]
        if is_last or (len(done) == beams.number and done[-1].score >= alive[0][0] / length**beams.length_penalty):
            break
        sums = torch.tensor([total for total, _, _ in alive])
        batch.select([row for _, row, _ in alive])
        batch.append([token for _, _, token in alive])
    return done
