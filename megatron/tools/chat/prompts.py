"""Texts with special tokens as tokens, which of them count in the loss, and prompts for an answer. No torch here."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron.common.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import EOD, RustTokenizer
from megatron.tools.chat.template import ChatTemplate, Text


class ChatPrompts:
    """The chat template and the tokenizer of a model.

    Attributes:
        stop: the special token by which the template ends an answer, if it is another than the end of a document.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        special, end = special_tokens(tokenizer), template.turn_end()
        names = [text for text, id in special.items() if end.startswith(text) and id != tokenizer.eod]
        self.stop = tuple(names[:1])

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt for the next message of the assistant. Raises DataError as ``ChatTemplate.prompt``."""
        return self.tokenize(self.text(messages))

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The same before it is tokenized."""
        return self._template.prompt(messages)

    def answer(self, messages: Sequence[Mapping[str, Any]], answer: str) -> str:
        """What the template writes of an answer after ``text``. Raises DataError as ``ChatTemplate.conversation``."""
        text = self._template.conversation([*messages, {"role": "assistant", "content": answer}]).text
        prompt = self.text(messages)
        if not text.startswith(prompt):
            raise DataError("the chat template writes a prompt that a conversation does not begin with")
        return text[len(prompt) :]

    def tokenize(self, text: str) -> list[int]:
        """A text that the template wrote, or a part of it, as tokens."""
        [(ids, _)] = tokenize_texts(self._tokenizer, [Text(text)])
        return ids


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The special tokens that a template may write, by their text."""
    return getattr(tokenizer, "special_tokens", {EOD: tokenizer.eod})


def tokenize_texts(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each text, and a 1 for each token that has a character that counts, else 0.

    The text of a special token becomes that token. A tokenizer that does not say which characters a token has is given
    what counts by itself.
    """
    if not isinstance(tokenizer, RustTokenizer):
        yield from _by_pieces(tokenizer, texts)
        return
    for text, encoding in zip(texts, tokenizer.encode_marked([text.text for text in texts]), strict=True):
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(begins), np.int64)
        for begin, end in text.counted:
            mask |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
        yield encoding.ids, mask.tolist()


def _by_pieces(tokenizer: Tokenizer, texts: Sequence[Text]) -> Iterator[tuple[list[int], list[int]]]:
    special = special_tokens(tokenizer)
    names = sorted(special, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")
    for text in texts:
        ids: list[int] = []
        mask: list[int] = []
        cuts = [0, *(cut for span in text.counted for cut in span), len(text.text)]
        for number, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            pieces = [piece for piece in pattern.split(text.text[begin:end]) if piece]
            plain = iter(tokenizer.tokenize_batch([piece for piece in pieces if piece not in special]))
            new = [id for piece in pieces for id in ([special[piece]] if piece in special else next(plain))]
            ids += new
            mask += [number % 2] * len(new)
        yield ids, mask
