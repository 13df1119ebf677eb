"""Text generation: continuations of prompts, streamed or at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron.common.errors import NumericsError
from megatron.tokenizer import Tokenizer
from megatron.tools.inference.batches import continues, new_tokens_after
from megatron.tools.inference.continuous_batch import ContinuousBatch, Detokenizer, Joining, Piece, Writer
from megatron.tools.inference.decoding import BeamSearch, Sampling, search_beams
from megatron.tools.inference.model import LanguageModel
from megatron.tools.inference.prompts import StoppingCriteria


@dataclass
class Completion:
    """A continuation of a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Including the tokens of a stop string, without the end of document."""
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
        self.continues = continues(model)
        """Whether completions continue the prompts; those of a model with an encoder are separate texts."""

    def batch(self) -> ContinuousBatch:
        """An empty batch, for completions that begin and end at different times."""
        return ContinuousBatch(self.model, self.tokenizer, use_cache=self._use_cache)

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

        The caller may stop iterating at any time. A completion depends only on the seed, the prompt and its index,
        counted from ``first_sample``.
        """
        batch = self.batch()
        batch.join(Joining(None, prompts, sampling, limits, samples, first_sample))
        return _pieces(batch)

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
            new_tokens=new_tokens_after(self.model, prompt, limits),
            context=limits.context,
            eod=self.tokenizer.eod,
            use_cache=self._use_cache,
        )
        return [self._completion(prompt, hypothesis.tokens) for hypothesis in hypotheses]

    def _completion(self, prompt: Sequence[int], tokens: Sequence[int]) -> Completion:
        completion = Completion()
        writer = Writer(0, 0, len(tokens), Detokenizer(self.tokenizer, prompt if self.continues else ()))
        for token in tokens:
            completion.add(writer.take(token, self.tokenizer.eod))
        return completion


def _pieces(batch: ContinuousBatch) -> Iterator[Piece]:
    """All that is left of the completions of ``batch``, step by step. Raises NumericsError if logits are not finite."""
    while batch:
        pieces = [piece for _, piece in batch.choose()]
        if any(piece.finish_reason == "error" for piece in pieces):
            raise NumericsError("the model's logits are not finite: check its weights; with --fp16 try --bf16")
        yield from pieces
        batch.advance()
