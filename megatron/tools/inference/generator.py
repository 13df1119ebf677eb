"""Text generation: completions of prompts, and the modes of tools/generate.py, in which rank 0 prints or writes them.

Every rank makes the same calls.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import torch.distributed as dist

from megatron.common.errors import ConfigError, NumericsError
from megatron.common.files import json_line
from megatron.common.screen import check_output
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.command_line import progress_bar
from megatron.tools.inference.batches import new_tokens_after
from megatron.tools.inference.continuous_batch import ContinuousBatch, Detokenizer, Joining, Piece, Writer
from megatron.tools.inference.decoding import BeamSearch, Sampling, search_beams
from megatron.tools.inference.images import ImageReader
from megatron.tools.inference.model import LanguageModel
from megatron.tools.inference.prompts import Prompt, StoppingCriteria, tokenized

T = TypeVar("T")


@dataclass
class Completion:
    """A continuation of a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Tokens, including those of a stop string, without the end of document."""
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += [] if piece.token is None else [piece.token]
        self.finish_reason = piece.finish_reason


class TextGenerator:
    """Completes prompts of tokens. All tensor-parallel ranks make the same calls and get the same results.

    Each method raises ConfigError at once for a prompt that is empty or too long.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, use_cache: bool = True):
        """``use_cache=False`` recomputes keys and values for each token."""
        self.model, self.tokenizer, self._use_cache = model, tokenizer, use_cache

    def batch(self) -> ContinuousBatch:
        """An empty batch for continuous batching."""
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
        counted from ``first_sample``. The iterator raises NumericsError if logits are not finite.
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
        """The complete results of ``stream``: ``samples`` of each prompt. ``on_piece`` is called with each piece."""
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
            ends=self.tokenizer.ends,
            use_cache=self._use_cache,
        )
        return [self._completion(prompt, hypothesis.tokens, limits) for hypothesis in hypotheses]

    def _completion(self, prompt: Sequence[int], tokens: Sequence[int], limits: StoppingCriteria) -> Completion:
        completion = Completion()
        text = Detokenizer(self.tokenizer, prompt if self.model.continues else (), hidden=limits.hidden)
        writer = Writer(0, 0, len(tokens), text)
        for token in tokens:
            completion.add(writer.take(token, self.tokenizer.ends))
        return completion


def _pieces(batch: ContinuousBatch) -> Iterator[Piece]:
    while batch:
        pieces = [piece for _, piece in batch.choose()]
        if any(piece.finish_reason == "error" for piece in pieces):
            raise NumericsError("the model's logits are not finite: check its weights; with --fp16 try --bf16")
        yield from pieces
        batch.advance()


@dataclass(frozen=True)
class Session:
    """A generator with the settings of tools/generate.py."""

    generator: TextGenerator
    sampling: Sampling
    limits: StoppingCriteria
    samples: int
    """Number of completions of each prompt."""
    beams: BeamSearch | None
    """Parameters of beam search, which replaces sampling."""
    batch_size: int
    """Number of completions computed together."""
    is_main_rank: bool
    """Whether this rank prints."""
    chat: ChatPrompts | None = None
    """The chat template, for prompts that are a user's messages."""
    images: ImageReader | None = None
    """The reader of images, for a model that takes images."""

    def show(self, prompt: Prompt) -> str:
        """Print a prompt with its completions; a single completion is streamed. Returns the first completion."""
        if self.samples == 1 and self.beams is None:
            self._print(prompt.text if self.generator.model.continues else "")
            [[completion]] = self._complete([prompt.tokens], 1, on_text=self._print)
            self._print("\n")
            return completion.text
        first = None
        for number, completion in enumerate(self._samples(prompt.tokens), start=1):
            first = completion.text if first is None else first
            heading = f"--- {number}\n" if self.samples > 1 else ""
            self._print(f"{heading}{prompt.text if self.generator.model.continues else ''}{completion.text}\n")
        return first or ""

    def converse(self) -> None:
        """Interactive mode: continue each line of input, or answer it as the next message of a conversation."""
        history: list[dict[str, str]] = []
        while (line := broadcast(self._input())) is not None:
            try:
                message = [("input", line, dict[str, Any]())]
                [prompt] = tokenized(message, self.generator.tokenizer, self.limits, self.chat, history, self.images)
                answer = self.show(prompt)
                history += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
            except ConfigError as error:
                self._print(f"{error}\n")
        self._print("\n")

    def write_completions(self, prompts: Sequence[Prompt], file: IO[str], *, as_json: bool) -> None:
        """Write each prompt with its completions, in order: as JSON lines, or text with an empty line after each."""
        batch_prompts = max(self.batch_size // self.samples, 1)
        for begin in self._steps(len(prompts), batch_prompts, "prompt"):
            batch = prompts[begin : begin + batch_prompts]
            tokens = [prompt.tokens for prompt in batch]
            together = len(batch) > 1 or self.samples <= self.batch_size
            results = self._complete(tokens, self.samples) if together else [list(self._samples(tokens[0]))]
            for prompt, completions in zip(batch, results, strict=True):
                if as_json:
                    _write_line(
                        file, {**prompt.record, "completions": [_record(completion) for completion in completions]}
                    )
                else:
                    prefix = prompt.text if self.generator.model.continues else ""
                    file.writelines(f"{prefix}{completion.text}\n\n" for completion in completions)

    def write_documents(self, file: IO[str]) -> None:
        """Write unconditional samples (completions of an end of document) as JSON lines."""
        beginning = [self.generator.tokenizer.eod]
        for completion in self._samples(beginning, shown=True):
            finished = completion.finish_reason == "stop"
            _write_line(file, {"text": completion.text, "length": len(completion.tokens), "finished": finished})

    def _samples(self, prompt: Sequence[int], *, shown: bool = False) -> Iterator[Completion]:
        """All completions of a prompt, ``batch_size`` of them computed together, with a progress bar if ``shown``."""
        size = self.batch_size if self.beams is None else self.samples  # one search returns all of them
        for begin in self._steps(self.samples, size, "text", shown=shown):
            yield from self._complete([prompt], min(size, self.samples - begin), first=begin)[0]

    def _complete(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        *,
        first: int = 0,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> list[list[Completion]]:
        if self.beams is not None:
            return [self.generator.search(prompt, self.beams, self.limits)[:samples] for prompt in prompts]
        return self.generator.complete(
            prompts,
            self.sampling,
            self.limits,
            samples=samples,
            first_sample=first,
            on_piece=lambda piece: on_text(piece.text),
        )

    def _input(self) -> str | None:
        """The next line of input on rank 0; None at the end of input, and on other ranks."""
        try:
            return input("> ") if self.is_main_rank else None
        except EOFError:
            return None

    def _print(self, text: str) -> None:
        if self.is_main_rank:
            sys.stdout.write(text)
            sys.stdout.flush()
            check_output()

    def _steps(self, total: int, size: int, unit: str, *, shown: bool = True) -> Iterator[int]:
        """First index of each batch, with a progress bar on the terminal of rank 0."""
        with progress_bar(total=total, unit=unit, shown=shown and self.is_main_rank) as progress:
            for begin in range(0, total, size):
                yield begin
                progress.update(min(size, total - begin))


def broadcast(value: T) -> T:
    """Rank 0's ``value``, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _record(completion: Completion) -> dict[str, str | int | None]:
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "new_tokens": len(completion.tokens),
    }


def _write_line(file: IO[str], record: dict) -> None:
    file.write(json_line(record))
