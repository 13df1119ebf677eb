"""Text behind prompts, as it comes or in one piece."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.inference.beam_search import Beams, search_beams
from megatron.inference.continuation import Continuation, LanguageModel
from megatron.inference.limits import Limits, checked_length
from megatron.inference.sampling import Sampling, choose, random_stream_of
from megatron.inference.text_stream import TextStream
from megatron.tokenizer import Tokenizer


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
