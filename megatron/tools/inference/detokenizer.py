"""Text that grows token by token."""

from collections.abc import Sequence

from megatron.tokenizer import Tokenizer

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
        """Tokens whose text is returned or pending; later ones are decoded together with those since ``_begin``."""
        self._begin = 0
        self._pending = ""
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
        text = self._release(self._decoded(allow_half=True)) + ("" if self.stopped else self._pending)
        self._pending = ""
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
        text = self._pending + text
        ends = [end for stop in self._stop if (end := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._pending = True, ""
            return text[: min(ends)]
        pending = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
