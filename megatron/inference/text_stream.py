"""Tokens to text while they come. No torch here."""

from collections.abc import Sequence

from megatron.tokenizer import Tokenizer

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
