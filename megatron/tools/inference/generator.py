"""Text behind prompts, as it comes or in one piece."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.tokenizer import Tokenizer
from megatron.tools.inference.decoding import Beams, Sampling, choose, random_stream_of, search_beams
from megatron.tools.inference.model import Continuation, LanguageModel
from megatron.tools.inference.prompts import Limits, checked_length

_HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are no character, or not yet one."""
_CONTEXT = 8
"""Tokens of the prompt that the first new one is read with: a blank between words depends on both."""


class TextStream:
    """The text that tokens add to a prompt: whole characters only, and nothing of a string that ends it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._said = len(self._tokens)
        """Tokens whose text is out, or in ``_held``; what comes next is read with those since ``_begin``."""
        self._begin = 0
        self._held = ""
        self.stopped = False
        """Whether one of the strings has come that end the text."""

    def push(self, token: int) -> str:
        """What can be said behind one more token, if anything."""
        self._tokens.append(token)
        return self._say(self._decoded(even_halves=False))

    def finish(self) -> str:
        """What is left to be said where no more tokens come; half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._say(self._decoded(even_halves=True)) + ("" if self.stopped else self._held)
        self._held = ""
        return text

    def _decoded(self, even_halves: bool) -> str:
        before = self._tokenizer.detokenize(self._tokens[self._begin : self._said])
        text = self._tokenizer.detokenize(self._tokens[self._begin :])
        if not even_halves and text.endswith(_HALF):
            return ""
        self._begin, self._said = self._said, len(self._tokens)
        return text[len(before) :]

    def _say(self, text: str) -> str:
        """All that is held and new, up to a string that ends it, without what may become the beginning of one."""
        text = self._held + text
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """What one more token adds to a sample."""

    prompt: int
    """Number of the prompt, from 0."""
    sample: int
    """Number of the sample of that prompt, from 0."""
    token: int | None
    """None for the end of document."""
    text: str
    """Whole characters: empty where the token is but half of one, or may be the beginning of a stop string."""
    finish_reason: str | None = None
    """In the last piece of a sample: ``stop`` (end of document, or a stop string) or ``length`` (the limit)."""


@dataclass
class Completion:
    """What was added to a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Those of a stop string included, the end of document not."""
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """One more piece of it."""
        self.text += piece.text
        self.tokens += [] if piece.token is None else [piece.token]
        self.finish_reason = piece.finish_reason


class TextGenerator:
    """Continues prompts, given as tokens. Every tensor-parallel rank calls it alike, and gets the same.

    Each method raises ConfigError at once for a prompt that is empty or too long.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, keeps: bool = True):
        """``keeps=False`` computes everything anew for each token."""
        self.model, self.tokenizer, self._keeps = model, tokenizer, keeps

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limits: Limits,
        *,
        samples: int = 1,
        first_sample: int = 0,
    ) -> Iterator[Piece]:
        """A piece for each token of ``samples`` texts for each prompt, which all grow together.

        Who has enough stops asking. The text of a sample depends on the seed, the prompt and the sample's number,
        counted from ``first_sample``, alone.
        """
        rooms = [checked_length(prompt, limits) - len(prompt) for prompt in prompts]
        writers = [
            _Writer(
                number,
                sample,
                rooms[number],
                TextStream(self.tokenizer, prompt, limits.stop),
                random_stream_of(sampling.seed, prompt, first_sample + sample),
            )
            for number, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        return self._stream(prompts, writers, sampling, limits.context)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limits: Limits,
        *,
        samples: int = 1,
        first_sample: int = 0,
        on_piece: Callable[[Piece], None] = lambda piece: None,
    ) -> list[list[Completion]]:
        """``samples`` texts for each prompt, as ``stream`` makes them; ``on_piece`` is shown each piece on the way."""
        completions = [[Completion() for _ in range(samples)] for _ in prompts]
        for piece in self.stream(prompts, sampling, limits, samples=samples, first_sample=first_sample):
            completions[piece.prompt][piece.sample].add(piece)
            on_piece(piece)
        return completions

    def search(self, prompt: Sequence[int], beams: Beams, limits: Limits) -> list[Completion]:
        """The likeliest texts behind a prompt that a search finds, one for each beam, best first; no stop strings."""
        room = checked_length(prompt, limits) - len(prompt)
        found = search_beams(
            self.model, prompt, beams, room=room, window=limits.context, eod=self.tokenizer.eod, keeps=self._keeps
        )
        return [self._told(prompt, hypothesis.tokens) for hypothesis in found]

    def _stream(
        self,
        prompts: Sequence[Sequence[int]],
        writers: list["_Writer"],
        sampling: Sampling,
        window: int,
    ) -> Iterator[Piece]:
        room = max(writer.room for writer in writers)
        batch = Continuation(self.model, prompts, window=window, room=room, keeps=self._keeps)
        batch.select([writer.prompt for writer in writers])
        while True:
            tokens = [
                choose(logits, sampling, writer.generator, sequence)
                for writer, logits, sequence in zip(writers, batch.logits, batch.sequences, strict=True)
            ]
            pieces = [writer.take(token, self.tokenizer.eod) for writer, token in zip(writers, tokens, strict=True)]
            yield from pieces
            going = [row for row, piece in enumerate(pieces) if piece.finish_reason is None]
            if not going:
                return
            if len(going) < len(writers):
                batch.select(going)
                writers = [writers[row] for row in going]
            batch.append([tokens[row] for row in going])

    def _told(self, prompt: Sequence[int], tokens: Sequence[int]) -> Completion:
        completion = Completion()
        writer = _Writer(0, 0, len(tokens), TextStream(self.tokenizer, prompt))
        for token in tokens:
            completion.add(writer.take(token, self.tokenizer.eod))
        return completion


@dataclass
class _Writer:
    """One sample on its way."""

    prompt: int
    sample: int
    room: int
    """Tokens that it may still have."""
    text: TextStream
    generator: torch.Generator | None = None

    def take(self, token: int, eod: int) -> Piece:
        """What the token adds, and whether it was the last."""
        self.room -= 1
        if token == eod:
            return Piece(self.prompt, self.sample, None, self.text.finish(), "stop")
        text = self.text.push(token)
        if not self.text.stopped and not self.room:
            text += self.text.finish()
        reason = "stop" if self.text.stopped else None if self.room else "length"
        return Piece(self.prompt, self.sample, token, text, reason)
