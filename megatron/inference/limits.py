"""How far a text goes, checked before anything is computed. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError

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
