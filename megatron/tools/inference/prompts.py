"""Prompts from a file, and what becomes of them. No torch here."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.errors import ConfigError, UserError
from megatron.tokenizer import Tokenizer

NEW_TOKENS = 64
"""Tokens that are added where nobody says how many."""


@dataclass(frozen=True)
class Limits:
    """What ends a text, beside the end of document."""

    context: int
    """Tokens that the model can see."""
    new_tokens: int | None = None
    """Tokens to add at most."""
    out_seq_length: int | None = None
    """Tokens at most, the prompt included."""
    slides: bool = False
    """Whether a text may be longer than what the model sees, which is then the last of it."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, and are no part of it."""

    def longest(self, prompt: int) -> int:
        """Tokens at most, with a prompt of so many.

        Raises ConfigError where the prompt is too long, or what is asked for longer than the model can see.
        """
        ends = [self.out_seq_length] if self.out_seq_length is not None else []
        if self.new_tokens is not None:
            ends.append(prompt + self.new_tokens)
        elif not ends:
            ends = [prompt + NEW_TOKENS, *([] if self.slides else [max(self.context, prompt + 1)])]
        total = min(ends)
        if total <= prompt:
            raise ConfigError(
                f"the prompt has {prompt} tokens, and --out-seq-length {self.out_seq_length} leaves no room for more"
            )
        if total > self.context and not self.slides:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {total - prompt} new ones are more than the {self.context} that the "
                "model can see; shorten the prompt, ask for fewer, or let --on-long-context slide"
            )
        return total


def checked_length(prompt: Sequence[int], limits: Limits) -> int:
    """Tokens at most of a text that begins with ``prompt``. Raises ConfigError where it is empty or too long."""
    if not prompt:
        raise ConfigError("the prompt is empty: give a text to continue")
    return limits.longest(len(prompt))


KEYS = ("prompt", "text")
"""Where a line of JSONL may have the prompt."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue."""

    text: str
    tokens: Sequence[int]
    record: dict[str, Any]
    """All that its line said, where it was JSON."""


def read_prompts(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Place, text and record of each line of a file: of JSON objects where it is named .jsonl, else of plain text.

    Raises ConfigError where the file cannot be read, or a line is not what it should be.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--sample-input-file {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--sample-input-file {path}: byte {error.start} is not UTF-8") from None
    lines = numbered(str(path), content)
    if not lines:
        raise ConfigError(f"--sample-input-file {path} is empty: write a prompt on each line")
    if is_jsonl(path):
        return [(place, *_from_json(place, line)) for place, line in lines]
    return [(place, line, {"prompt": line}) for place, line in lines]


def is_jsonl(path: Path) -> bool:
    """Whether a file holds a JSON object a line, by its name."""
    return path.suffix == ".jsonl"


def numbered(name: str, content: str) -> list[tuple[str, str]]:
    """The place and the text of each line."""
    lines = content.removesuffix("\n").split("\n") if content else []
    return [(f"{name}:{number}", line.removesuffix("\r")) for number, line in enumerate(lines, start=1)]


def tokenized(texts: Iterable[tuple[str, str, dict[str, Any]]], tokenizer: Tokenizer, limits: Limits) -> list[Prompt]:
    """The prompts in tokens. Raises ConfigError with the place of one that is empty, too long, or has no tokens."""
    prompts = []
    for place, text, record in texts:
        try:
            tokens = tokenizer.tokenize(text)
            checked_length(tokens, limits)
        except UserError as error:
            raise ConfigError(f"{place}: {error}") from None
        prompts.append(Prompt(text, tokens, record))
    return prompts


def _from_json(place: str, line: str) -> tuple[str, dict[str, Any]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{place}: not JSON ({error}); write {{"prompt": "..."}} on each line') from None
    text = next((record[key] for key in KEYS if key in record), None) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{place}: no text to continue; write {{"prompt": "..."}} on each line')
    return text, record
