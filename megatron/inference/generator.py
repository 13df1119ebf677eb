"""Text behind prompts, as it comes or in one piece."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

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
    """Continues prompts with a model. Every tensor-parallel rank calls it alike, and gets the same."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, keeps: bool = True):
        """``keeps=False`` computes everything anew for each token."""
        self.model, self.tokenizer, self._keeps = model, tokenizer, keeps

    def stream(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, limits: Limits, *, samples: int = 1
    ) -> Iterator[Piece]:
        """A piece for each token of ``samples`` texts for each prompt, given as tokens; all texts grow together.

        Who has enough stops asking. Raises ConfigError at once for a prompt that is empty or too long.
        """
        longest = [checked_length(prompt, limits) for prompt in prompts]
        return self._stream(prompts, longest, sampling, limits, samples)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        limits: Limits,
        *,
        samples: int = 1,
        on_piece: Callable[[Piece], None] = lambda piece: None,
    ) -> list[list[Completion]]:
        """``samples`` texts for each prompt, as ``stream`` makes them; ``on_piece`` is shown each piece on the way."""
        completions = [[Completion() for _ in range(samples)] for _ in prompts]
        for piece in self.stream(prompts, sampling, limits, samples=samples):
            completions[piece.prompt][piece.sample].add(piece)
            on_piece(piece)
        return completions

    def _stream(
        self,
        prompts: Sequence[Sequence[int]],
        longest: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        samples: int,
    ) -> Iterator[Piece]:
        batch = Continuation(self.model, prompts, window=limits.context, longest=max(longest), keeps=self._keeps)
        writers = [
            _Writer(number, sample, longest[number] - len(prompt), prompt, self.tokenizer, sampling, limits.stop)
            for number, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        batch.select([writer.prompt for writer in writers])
        while True:
            drawn = [
                writer.choose(logits, sequence)
                for writer, logits, sequence in zip(writers, batch.logits, batch.sequences, strict=True)
            ]
            pieces = [writer.take(token) for writer, token in zip(writers, drawn, strict=True)]
            yield from pieces
            going = [row for row, piece in enumerate(pieces) if piece.finish_reason is None]
            if not going:
                return
            if len(going) < len(writers):
                batch.select(going)
                writers = [writers[row] for row in going]
            batch.append([drawn[row] for row in going])


class _Writer:
    """One sample on its way."""

    def __init__(
        self,
        number: int,
        sample: int,
        room: int,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        sampling: Sampling,
        stop: Sequence[str],
    ):
        self.prompt, self._sample, self._room, self._eod = number, sample, room, tokenizer.eod
        self._text = TextStream(tokenizer, prompt, stop)
        self._sampling = sampling
        self._generator = random_stream_of(sampling.seed, prompt, sample)

    def choose(self, logits: Tensor, sequence: Sequence[int]) -> int:
        return choose(logits, self._sampling, self._generator, sequence)

    def take(self, token: int) -> Piece:
        """What the token adds, and whether it was the last."""
        self._room -= 1
        if token == self._eod:
            return Piece(self.prompt, self._sample, None, self._text.finish(), "stop")
        text = self._text.push(token)
        if not self._text.stopped and not self._room:
            text += self._text.finish()
        reason = "stop" if self._text.stopped else None if self._room else "length"
        return Piece(self.prompt, self._sample, token, text, reason)
