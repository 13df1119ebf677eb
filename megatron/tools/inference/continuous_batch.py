"""Continuous batching: completions of several requests are computed together, and join and leave between tokens."""

import re
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron.tokenizer import Tokenizer
from megatron.tools.inference.batches import DecodingBatch, decoding_batch, new_tokens_after
from megatron.tools.inference.decoding import NOT_FINITE, Logprobs, Row, Sampling, choose, logprobs, sample_generator
from megatron.tools.inference.model import LanguageModel
from megatron.tools.inference.prompts import StoppingCriteria


class Piece(NamedTuple):
    """The increment of a completion by one token."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index of the completion of that prompt."""
    token: int | None
    """None for the end of document."""
    text: str
    """Complete characters; empty if the token ends within one, or may begin a stop string."""
    finish_reason: str | None = None
    """In the last piece of a completion: ``stop`` (end of document or stop string), ``length`` (token limit), or
    ``error`` if its logits are not finite."""
    logprobs: Logprobs | None = None
    """Log-probabilities, if requested and if there is a token."""
    offset: int = 0
    """Number of characters of the completion before the token, also of those that are held back."""


class Joining(NamedTuple):
    """Arguments for completions that join a batch: ``samples`` of each prompt.

    A completion depends only on the seed, the prompt and its index, counted from ``first_sample``.
    """

    request: Hashable
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    limits: StoppingCriteria
    samples: int = 1
    first_sample: int = 0
    varies: bool = False
    """Whether the prompts of the request count as different ones, so that equal ones get different texts."""


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for bytes that are not valid UTF-8, or only the beginning of a character."""
_CONTEXT = 8
"""Tokens of the prompt that are decoded together with the first new token: a space between words depends on both."""


class Detokenizer:
    """Incremental detokenizer: the text that each new token adds, in complete characters and without stop strings."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), hidden: Sequence[str] = ()
    ):
        """``hidden`` are texts to leave out."""
        self._tokenizer = tokenizer
        self._hidden = re.compile("|".join(map(re.escape, hidden)) or "(?!)")
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._decoded_to = len(self._tokens)
        """Number of tokens whose text is returned or pending; later tokens are decoded from ``_begin`` on."""
        self._begin = 0
        self._pending = ""
        self.length = 0
        """Number of complete characters, returned or pending."""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, token: int) -> str:
        """The text to add after one more token; may be empty."""
        self._tokens.append(token)
        return self._release(self._decoded(allow_incomplete=False))

    def finish(self) -> str:
        """The remaining text after the last token; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoded(allow_incomplete=True))
        text += "" if self.stopped else self._hidden.sub("", self._pending)
        self._pending = ""
        return text

    def _decoded(self, allow_incomplete: bool) -> str:
        before = self._tokenizer.detokenize(self._tokens[self._begin : self._decoded_to])
        text = self._tokenizer.detokenize(self._tokens[self._begin :])
        if not allow_incomplete and text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._decoded_to = self._decoded_to, len(self._tokens)
        self.length += max(len(text) - len(before), 0)
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """Pending and new text up to a stop string; a suffix that may begin a stop string stays pending."""
        text = self._pending + text
        ends = [end for stop in self._stop if (end := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._pending = True, ""
            return self._hidden.sub("", text[: min(ends)])
        pending = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - pending :]
        return self._hidden.sub("", text[: len(text) - pending])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Writer:
    """One completion in progress."""

    prompt: int
    sample: int
    tokens_left: int
    """Number of tokens that may still be added."""
    text: Detokenizer
    request: Hashable = None
    """The request that the completion belongs to."""
    sampling: Sampling = Sampling()
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """Random numbers for sampling."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the completion so far."""

    def take(self, token: int, ends: Container[int]) -> Piece:
        """Append a token. Returns the piece that it adds."""
        self.tokens_left -= 1
        self.tokens.append(token)
        if token in ends:
            return Piece(self.prompt, self.sample, None, self.text.finish(), "stop")
        offset, text = self.text.length, self.text.push(token)
        if not self.text.stopped and not self.tokens_left:
            text += self.text.finish()
        reason = "stop" if self.text.stopped else None if self.tokens_left else "length"
        return Piece(self.prompt, self.sample, token, text, reason, offset=offset)

    def fail(self) -> Piece:
        """End the completion with an error, without a token."""
        return Piece(self.prompt, self.sample, None, "", "error")


class ContinuousBatch:
    """Completions in progress. Requests ``join`` and ``leave`` at any time; ``choose`` and ``advance`` take turns.

    Each completion has its own length, sampling parameters and random generator, so its text does not depend on the
    others. All tensor-parallel ranks make the same calls and get the same results.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, use_cache: bool = True):
        """``use_cache=False`` recomputes keys and values for each token."""
        self._model, self._tokenizer, self._use_cache = model, tokenizer, use_cache
        self._groups: list[_Group] = []
        """The first group has all completions with a cache; each other group is computed separately."""

    def __len__(self) -> int:
        """Number of completions in progress."""
        return sum(len(group.writers) for group in self._groups)

    def has(self, request: Hashable) -> bool:
        """Whether completions of a request are in progress."""
        return any(writer.request == request for group in self._groups for writer in group.writers)

    def join(self, *joining: Joining) -> None:
        """Add completions, all with the same context length. Only their prompts are computed, together.

        Raises ConfigError for a prompt that is empty or too long.
        """
        writers, prompts, rows = list[Writer](), list[Sequence[int]](), list[int]()
        for new in joining:
            new_tokens = [new_tokens_after(self._model, prompt, new.limits) for prompt in new.prompts]
            for number, prompt in enumerate(new.prompts):
                writers += [self._writer(new, number, sample, new_tokens[number]) for sample in range(new.samples)]
                rows += [len(prompts)] * new.samples
                prompts.append(prompt)
        batch = decoding_batch(self._model, prompts, context=joining[0].limits.context, use_cache=self._use_cache)
        if len(rows) > len(prompts):
            batch.select(rows)
        group = next((group for group in self._groups if group.batch.can_join(batch)), None)
        if group is None:
            self._groups.append(_Group(batch, writers))
        else:
            group.batch.join(batch)
            group.writers += writers

    def _writer(self, joining: Joining, number: int, sample: int, new_tokens: int) -> Writer:
        prompt, sampling = joining.prompts[number], joining.sampling
        first = joining.first_sample + (number * joining.samples if joining.varies else 0)
        return Writer(
            number,
            sample,
            new_tokens,
            Detokenizer(
                self._tokenizer, prompt if self._model.continues else (), joining.limits.stop, joining.limits.hidden
            ),
            joining.request,
            sampling,
            sample_generator(sampling.seed, prompt, first + sample),
        )

    def leave(self, request: Hashable) -> None:
        """Remove the completions of an unfinished request."""
        for group in self._groups:
            group.keep([row for row, writer in enumerate(group.writers) if writer.request != request])
        self._groups = [group for group in self._groups if group.writers]

    def clear(self) -> None:
        """Remove all completions, after an error."""
        self._groups = []

    def choose(self) -> list[tuple[Hashable, Piece]]:
        """Choose the next token of every completion. Returns a piece of each; finished completions leave."""
        pieces = [piece for group in self._groups for piece in group.choose(self._tokenizer.ends)]
        self._groups = [group for group in self._groups if group.writers]
        return pieces

    def advance(self) -> None:
        """Compute the next logits, from the tokens chosen last."""
        for group in self._groups:
            group.advance()


@dataclass
class _Group:
    """Completions that are computed as one batch."""

    batch: DecodingBatch
    writers: list[Writer]
    """The completion in each row of the batch."""
    chosen: list[int] = field(default_factory=list)
    """The last token chosen for each row, not yet processed by the model."""

    def choose(self, ends: Container[int]) -> list[tuple[Hashable, Piece]]:
        rows = [
            Row(writer.sampling, writer.generator, sequence, writer.tokens)
            for writer, sequence in zip(self.writers, self.batch.sequences, strict=True)
        ]
        self.chosen = choose(self.batch.logits, rows)
        pieces = [
            (writer.request, writer.fail() if token == NOT_FINITE else writer.take(token, ends))
            for writer, token in zip(self.writers, self.chosen, strict=True)
        ]
        for row, (writer, (request, piece)) in enumerate(zip(self.writers, pieces, strict=True)):
            if piece.token is not None and writer.sampling.logprobs is not None:
                token_logprobs = logprobs(self.batch.logits[row], piece.token, writer.sampling.logprobs)
                pieces[row] = request, piece._replace(logprobs=token_logprobs)
        self.keep([row for row, (_, piece) in enumerate(pieces) if piece.finish_reason is None])
        return pieces

    def advance(self) -> None:
        self.batch.append(self.chosen)
        self.chosen = []

    def keep(self, rows: list[int]) -> None:
        """Keep only the completions in these ``rows``."""
        if len(rows) == len(self.writers):
            return
        self.writers = [self.writers[row] for row in rows]
        self.chosen = [self.chosen[row] for row in rows] if self.chosen else []
        if rows:
            self.batch.select(rows)
