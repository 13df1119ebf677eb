"""Conversations as prompts for the next answer. No torch here."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.common.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatTemplate, Text
from megatron.tools.chat.tokens import special_tokens, tokenize_texts


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
