"""Text generation: continuations of prompts, streamed or whole."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.tokenizer import Tokenizer
from megatron.tools.inference.decoding import BeamSearch, Sampling, choose, sample_generator, search_beams
from megatron.tools.inference.model import DecodingBatch, LanguageModel
from megatron.tools.inference.prompts import StoppingCriteria, checked_length

_HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for bytes that are no character, or not yet one."""
_CONTEXT = 8
"""Tokens of the prompt that are decoded with the first new one: a blank between words depends on both."""


class Detokenizer:
    """Incremental detokenizer: the text that each new token adds, in whole characters and without stop strings."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._decoded_to = len(self._tokens)
        """Tokens whose text is returned or held; later ones are decoded together with those since ``_begin``."""
        self._begin = 0
        self._held = ""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, token: int) -> str:
        """The text to add after one more token; may be empty."""
        self._tokens.append(token)
        return self._release(self._decoded(allow_half=False))

    def finish(self) -> str:
        """The rest of the text after the last token; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoded(allow_half=True)) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _decoded(self, allow_half: bool) -> str:
        before = self._tokenizer.detokenize(self._tokens[self._begin : self._decoded_to])
        text = self._tokenizer.detokenize(self._tokens[self._begin :])
        if not allow_half and text.endswith(_HALF):
            return ""
        self._begin, self._decoded_to = self._decoded_to, len(self._tokens)
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """Held and new text up to a stop string, without an end that may be the beginning of one."""
        text = self._held + text
        ends = [end for stop in self._stop if (end := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """What one more token adds to a completion."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index of the completion of that prompt."""
    token: int | None
    """None for the end of document."""
    text: str
    """Whole characters; empty if the token is half of one, or may be the beginning of a stop string."""
    finish_reason: str | None = None
    """In the last piece of a completion: ``stop`` (end of document or stop string) or ``length`` (token limit)."""


@dataclass
class Completion:
    """A continuation of a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Including those of a stop string, without the end of document."""
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += [] if piece.token is None else [piece.token]
        self.finish_reason = piece.finish_reason


class TextGenerator:
    """Continues prompts, given as tokens. All tensor-parallel ranks make the same calls and get the same results.

    Each method raises ConfigError at once for a prompt that is empty or too long.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, use_cache: bool = True):
        """``use_cache=False`` recomputes keys and values for each token."""
        self.model, self.tokenizer, self._use_cache = model, tokenizer, use_cache

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limits: StoppingCriteria,
        *,
        samples: int = 1,
        first_sample: int = 0,
    ) -> Iterator[Piece]:
        """A piece for each token of ``samples`` completions of each prompt, computed as one batch.

        The caller may stop iterating at any time. A completion depends on the seed, the prompt and its index alone,
        counted from ``first_sample``.
        """
        new_tokens = [checked_length(prompt, limits) - len(prompt) for prompt in prompts]
        writers = [
            _Writer(
                number,
                sample,
                new_tokens[number],
                Detokenizer(self.tokenizer, prompt, limits.stop),
                sample_generator(sampling.seed, prompt, first_sample + sample),
            )
            for number, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        return self._stream(prompts, writers, sampling, limits.context)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limits: StoppingCriteria,
        *,
        samples: int = 1,
        first_sample: int = 0,
        on_piece: Callable[[Piece], None] = lambda piece: None,
    ) -> list[list[Completion]]:
        """``samples`` completions of each prompt, as of ``stream``; ``on_piece`` is called with each piece."""
        completions = [[Completion() for _ in range(samples)] for _ in prompts]
        for piece in self.stream(prompts, sampling, limits, samples=samples, first_sample=first_sample):
            completions[piece.prompt][piece.sample].add(piece)
            on_piece(piece)
        return completions

    def search(self, prompt: Sequence[int], beams: BeamSearch, limits: StoppingCriteria) -> list[Completion]:
        """The most likely continuations found by beam search, one for each beam, best first; no stop strings."""
        hypotheses = search_beams(
            self.model,
            prompt,
            beams,
            new_tokens=checked_length(prompt, limits) - len(prompt),
            context=limits.context,
            eod=self.tokenizer.eod,
            use_cache=self._use_cache,
        )
        return [self._completion(prompt, hypothesis.tokens) for hypothesis in hypotheses]

    def _stream(
        self,
        prompts: Sequence[Sequence[int]],
        writers: list["_Writer"],
        sampling: Sampling,
        context: int,
    ) -> Iterator[Piece]:
        new_tokens = max(writer.tokens_left for writer in writers)
        batch = DecodingBatch(self.model, prompts, context=context, new_tokens=new_tokens, use_cache=self._use_cache)
        batch.select([writer.prompt for writer in writers])
        while True:
            tokens = [
                choose(logits, sampling, writer.generator, sequence)
                for writer, logits, sequence in zip(writers, batch.logits, batch.sequences, strict=True)
            ]
            pieces = [writer.take(token, self.tokenizer.eod) for writer, token in zip(writers, tokens, strict=True)]
            yield from pieces
            unfinished = [row for row, piece in enumerate(pieces) if piece.finish_reason is None]
            if not unfinished:
                return
            if len(unfinished) < len(writers):
                batch.select(unfinished)
                writers = [writers[row] for row in unfinished]
            batch.append([tokens[row] for row in unfinished])

    def _completion(self, prompt: Sequence[int], tokens: Sequence[int]) -> Completion:
        completion = Completion()
        writer = _Writer(0, 0, len(tokens), Detokenizer(self.tokenizer, prompt))
        for token in tokens:
            completion.add(writer.take(token, self.tokenizer.eod))
        return completion


@dataclass
class _Writer:
    """One completion in progress."""

    prompt: int
    sample: int
    tokens_left: int
    """Tokens that may still be added."""
    text: Detokenizer
    generator: torch.Generator = field(default_factory=torch.Generator)
    """Random numbers for sampling."""

    def take(self, token: int, eod: int) -> Piece:
        """Append a token."""
        self.tokens_left -= 1
        if token == eod:
            return Piece(self.prompt, self.sample, None, self.text.finish(), "stop")
        text = self.text.push(token)
        if not self.text.stopped and not self.tokens_left:
            text += self.text.finish()
        reason = "stop" if self.text.stopped else None if self.tokens_left else "length"
        return Piece(self.prompt, self.sample, token, text, reason)
