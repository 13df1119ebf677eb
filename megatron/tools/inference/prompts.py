"""Reading and tokenizing prompts, and stopping criteria. Does not import torch."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, UserError, counted
from megatron.common.reading import LARGEST, parse_json, read_text
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatPrompts
from megatron.tools.chat.tokens import tokenize_marked
from megatron.tools.inference.images import ImagePrompt, ImageReader

NEW_TOKENS = 64
"""Default of --new-tokens."""


@dataclass(frozen=True)
class StoppingCriteria:
    """Conditions that end a completion, in addition to the end of document."""

    context: int
    """Context length of the model, in tokens."""
    new_tokens: int | None = None
    """Maximum number of new tokens."""
    out_seq_length: int | None = None
    """Maximum number of tokens, including the prompt."""
    slides: bool = False
    """Whether a text may exceed the context, which then slides along the text."""
    stop: tuple[str, ...] = ()
    """Strings that end a text and are removed from it."""
    hidden: tuple[str, ...] = ()
    """Special tokens that are not written."""

    def longest(self, prompt: int) -> int:
        """Maximum number of tokens, including a prompt of ``prompt`` tokens.

        Raises ConfigError if the prompt or the requested length exceeds the limits.
        """
        ends = [self.out_seq_length] if self.out_seq_length is not None else []
        if self.new_tokens is not None:
            ends.append(prompt + self.new_tokens)
        elif not ends:
            ends = [prompt + NEW_TOKENS, *([] if self.slides else [max(self.context, prompt + 1)])]
        total = min(ends)
        if total <= prompt:
            raise ConfigError(
                f"the prompt has {counted(prompt, 'token')}, and --out-seq-length {self.out_seq_length} leaves none "
                "for new tokens"
            )
        if total > self.context and not self.slides:
            raise ConfigError(
                f"a prompt of {counted(prompt, 'token')} and {total - prompt} new ones exceed the {self.context} "
                "of the model's context; shorten the prompt, ask for fewer, or let --on-long-context slide"
            )
        return total


def prompt_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt, after the tokens with which texts of the model begin; none if it is empty.

    As in transformers, texts of special tokens are special tokens. Raises DataError as ``Tokenizer.tokenize``.
    """
    ids = tokenize_marked(tokenizer, text)
    return [*tokenizer.opening, *ids] if ids else []


def checked_length(prompt: Sequence[int], limits: StoppingCriteria) -> int:
    """Maximum number of tokens, including ``prompt``. Raises ConfigError if it is empty or too long."""
    if not prompt:
        raise ConfigError("the prompt is empty: give a text to continue")
    return limits.longest(len(prompt))


KEYS = ("prompt", "text")
"""Keys of the prompt in a line of JSONL."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    tokens: Sequence[int]
    record: dict[str, Any]
    """The JSON object of its line; ``{"prompt": text}`` for plain text."""


def read_prompts(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Location, text and record of each line of a file, JSON lines if it is named .jsonl, otherwise plain text.

    Raises ConfigError if the file cannot be read, or a line is invalid.
    """
    content = read_text(path, "--sample-input-file", largest=LARGEST).replace("\r\n", "\n")
    lines = numbered(str(path), content)
    if not lines:
        raise ConfigError(f"--sample-input-file {path} is empty: write a prompt on each line")
    if is_jsonl(path):
        return [(location, *_from_json(location, line)) for location, line in lines]
    return [(location, line, {"prompt": line}) for location, line in lines]


def read_standard_input() -> list[tuple[str, str]]:
    """Location and text of each line of standard input. Raises ConfigError if it is empty, too long or not UTF-8."""
    content = sys.stdin.buffer.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ConfigError(f"standard input has more than {LARGEST:,} bytes: divide the prompts")
    try:
        text = content.decode()
    except UnicodeError:
        raise ConfigError("standard input is not UTF-8: write text, one prompt per line") from None
    if not text:
        raise ConfigError("standard input is empty: give --prompt or --sample-input-file, or write one prompt per line")
    return numbered("standard input", text)


def is_jsonl(path: Path) -> bool:
    """Whether a file has JSON lines, according to its name."""
    return path.suffix == ".jsonl"


def numbered(name: str, content: str) -> list[tuple[str, str]]:
    """Location and text of each line."""
    lines = content.removesuffix("\n").split("\n") if content else []
    return [(f"{name}:{number}", line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]


def tokenized(
    texts: Iterable[tuple[str, str, dict[str, Any]]],
    tokenizer: Tokenizer,
    limits: StoppingCriteria,
    chat: ChatPrompts | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    images: ImageReader | None = None,
) -> list[Prompt]:
    """Tokenize prompts; with ``chat``, each is a user's message after ``history``, and has no text to print.

    Images come before the text, or before the first message of the history, unless it has marks.

    Raises ConfigError with the location of a prompt that is empty or too long.
    """
    prompts = []
    for location, text, record in texts:
        try:
            first, *others = [*(history if chat else ()), {"role": "user", "content": text}]
            if images is not None:
                first = {**first, "content": images.marked(first["content"], record)}
            prompt_text = first["content"] if chat is None else chat.text([first, *others])
            tokens: Sequence[int]
            if images is not None:
                found = images.tokens(prompt_text, record, partial(tokenize_marked, tokenizer))
                tokens = ImagePrompt([*(() if chat else tokenizer.opening), *found], found.images)
            else:
                tokens = prompt_tokens(prompt_text, tokenizer) if chat is None else chat.tokenize(prompt_text)
            checked_length(tokens, limits)
        except UserError as error:
            raise ConfigError(f"{location}: {error}") from None
        prompts.append(Prompt(text if chat is None else "", tokens, record))
    return prompts


def _from_json(location: str, line: str) -> tuple[str, dict[str, Any]]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f'{location}: not JSON ({error}); write {{"prompt": "..."}} on each line') from None
    text = next((record[key] for key in KEYS if key in record), None) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{location}: no text to continue; write {{"prompt": "..."}} on each line')
    return text, record
