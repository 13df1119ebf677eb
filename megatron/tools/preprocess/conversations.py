"""Conversations, and prompts with completions, as tokens with a loss mask: the data of instruction tuning.

Of a document some characters count in the loss: the turns of the assistant, or the completion. A conversation is
tokenized as a whole, as transformers does it, and tokens count that have such a character; a prompt and its completion
are tokenized one by one, as in generation, where the prompt is tokenized before the completion exists.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.common.errors import DataError
from megatron.tokenizer import Tokenizer
from megatron.tools.chat.template import ChatTemplate, Text
from megatron.tools.chat.tokens import tokenize_texts
from megatron.tools.preprocess.corpus import json_object

KEYS: Mapping[str, tuple[str, ...]] = {"messages": ("messages",), "prompt-completion": ("prompt", "completion")}
"""Kinds of documents, and the keys of a line's JSON object that hold them."""


def line_documents(where: str, line: bytes, kind: str, template: ChatTemplate | None) -> list[Text]:
    """The texts of a line's JSON object; none of a blank line.

    Raises DataError beginning with ``where`` if it is not of its ``kind``.
    """
    document = json_object(where, line)
    if document is None:
        return []
    for key in KEYS[kind]:
        if key not in document:
            raise DataError(f'{where}: no key "{key}", which --format {kind} reads')
    if template is not None:
        texts = [_conversation(where, document, template)]
    elif all(isinstance(document[key], str) for key in KEYS[kind]):
        prompt, completion = (document[key] for key in KEYS[kind])
        texts = [Text(prompt), Text(completion, [(0, len(completion))])]
    else:
        raise DataError(f"{where}: {' and '.join(KEYS[kind])} must be strings")
    try:
        "".join(part.text for part in texts).encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell what is no Unicode text
        raise DataError(f"{where}: the text holds half of a surrogate pair (\\ud800 to \\udfff)") from error
    return texts


def _conversation(where: str, document: Mapping[str, Any], template: ChatTemplate) -> Text:
    messages = document["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise DataError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    try:
        text = template.conversation(messages, document.get("tools"))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message of the assistant: nothing to train on")
    return text


def tokenize_documents(
    tokenizer: Tokenizer, documents: Sequence[Sequence[Text]], *, append_eod: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each document, and the loss mask: a 0 or 1 for each. The first token never counts.

    The text of a special token becomes that token. With ``append_eod`` the end of a document follows it, and counts
    if what is before it does.
    """
    tokenized = iter(tokenize_texts(tokenizer, [text for document in documents for text in document]))
    for document in documents:
        ids: list[int] = []
        mask: list[int] = []
        for new, counts in (next(tokenized) for _ in document):
            ids += new
            mask += counts
        if append_eod:
            ids.append(tokenizer.eod)
            mask.append(mask[-1] if mask else 0)
        yield ids, [0, *mask[1:]] if mask else []
