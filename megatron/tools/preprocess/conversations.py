"""Conversations, and prompts with completions, as tokens with a loss mask: the data of instruction tuning.

A document is divided into parts, of which some count in the loss: the turns of the assistant, or the completion. Parts
are tokenized one by one, as in generation, where the prompt is tokenized before the answer exists.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.common.errors import ConfigError, DataError, did_you_mean
from megatron.common.reading import read_json
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import EOD, read_text
from megatron.tools.preprocess.corpus import json_object

KEYS: Mapping[str, tuple[str, ...]] = {"messages": ("messages",), "prompt-completion": ("prompt", "completion")}
"""Kinds of documents, and the keys of a line's JSON object that hold them."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. Others must be named in the chat template."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Around what an assistant generates: code points that are no characters, and in no text."""


class Part(NamedTuple):
    """Consecutive text of a document."""

    text: str
    counts: bool
    """Whether its tokens count in the loss."""


class ChatTemplate:
    """A template of Jinja that writes a conversation as text, as the tokenizers of Hugging Face models have it.

    Args:
        source: the template.
        special: the texts of special tokens by the names that the template uses, such as ``eos_token``.

    Raises ConfigError if it cannot be parsed.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be parsed: {error}") from error
        self._special = dict(special)
        self._own_roles = frozenset(name for pair in re.findall(r"'(\w+)'|\"(\w+)\"", source) for name in pair if name)
        self._marks_answers = "{%" in source and bool(re.search(r"\{%-?\s*generation\b", source))

    def parts(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[Part]:
        """The conversation in parts, of which the assistant's turns count.

        A turn is what ``{% generation %}`` surrounds, or else what the template adds to the conversation before it
        that ends with the generation prompt.

        Raises DataError if the template rejects the conversation, or changes earlier turns afterwards, and for a role
        that is neither in ``ROLES`` nor in the template.
        """
        for number, message in enumerate(messages, start=1):
            if message["role"] not in self._own_roles.union(ROLES):
                known = f"use {', '.join(ROLES)}, or one that the chat template names"
                advice = did_you_mean(message["role"], ROLES, otherwise=known)
                raise DataError(f"the role {message['role']!r} of message {number} is unknown: {advice}")
        text = self._render(messages, tools)
        if self._marks_answers:
            pieces = re.split(f"[{_BEGIN}{_END}]", text)
            return [Part(piece, bool(number % 2)) for number, piece in enumerate(pieces)]
        parts, end = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], tools, add_generation_prompt=True)
            answered = self._render(messages[: number + 1], tools)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise DataError(
                    f"the chat template writes message {number + 1} in another way when others follow, or without the "
                    "prompt for it: put {% generation %} and {% endgeneration %} around answers in the template"
                )
            parts += [Part(text[end : len(prompt)], False), Part(text[len(prompt) : len(answered)], True)]
            end = len(answered)
        return [*parts, Part(text[end:], False)]

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                self._special, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"the chat template: {error}") from error


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which is around what an assistant generates."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise(message: str) -> None:
    raise TemplateError(message)


def chat_template(file: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template in a file of its own, or in a ``tokenizer_config.json``. Special tokens are the tokenizer's.

    Raises ConfigError if it holds none.
    """
    texts: dict[int | None, str] = {id: text for text, id in special_tokens(tokenizer).items()}
    return _read_template(file, texts.get(tokenizer.eod, EOD), texts.get(tokenizer.bos, ""))


def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The special tokens that a template may write, by their text."""
    return getattr(tokenizer, "special_tokens", {EOD: tokenizer.eod})


@cache
def _read_template(file: str, eos_token: str, bos_token: str) -> ChatTemplate:
    path = Path(file)
    config = _tokenizer_config(path)
    source = read_text(file)
    if path.suffix == ".json":
        found = config.get("chat_template")
        if isinstance(found, list):  # of several, the one by the name of default
            found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
        if not isinstance(found, str):
            raise ConfigError(f'{file} has no "chat_template": give one with --chat-template')
        source = found
    special = {name: value for name in ("bos_token", "eos_token", "pad_token") if (value := _token(config.get(name)))}
    return ChatTemplate(source, {"eos_token": eos_token, "bos_token": bos_token, **special})


def find_chat_template(chosen: str | None, vocab_file: str | None) -> str:
    """The file of the chat template: ``chosen``, or one in the folder of the vocabulary. Raises ConfigError."""
    if chosen is not None:
        if not Path(chosen).is_file():
            raise ConfigError(f"--chat-template {chosen}: no such file")
        return chosen
    folder = Path(vocab_file or ".").parent
    for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        if path.is_file() and (path.suffix != ".json" or "chat_template" in _tokenizer_config(path)):
            return str(path)
    raise ConfigError(
        f"--format messages needs a chat template, and {folder} has neither chat_template.jinja nor a "
        "tokenizer_config.json with one: give --chat-template"
    )


def _tokenizer_config(template: Path) -> dict[str, Any]:
    """The ``tokenizer_config.json`` in the folder of a template, or nothing."""
    path = template if template.suffix == ".json" else template.parent / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    return config if isinstance(config, dict) else {}


def _token(value: Any) -> str | None:
    """The text of a special token, which is a string or an object with it."""
    return value.get("content") if isinstance(value, dict) else value


def line_parts(where: str, line: bytes, kind: str, template: ChatTemplate | None) -> list[Part]:
    """The parts of a line's JSON object; none of a blank line.

    Raises DataError beginning with ``where`` if it is not of its ``kind``.
    """
    document = json_object(where, line)
    if document is None:
        return []
    for key in KEYS[kind]:
        if key not in document:
            raise DataError(f'{where}: no key "{key}", which --format {kind} reads')
    if template is not None:
        parts = _conversation(where, document, template)
    elif all(isinstance(document[key], str) for key in KEYS[kind]):
        prompt, completion = (document[key] for key in KEYS[kind])
        parts = [Part(prompt, False), Part(completion, True)]
    else:
        raise DataError(f"{where}: {' and '.join(KEYS[kind])} must be strings")
    try:
        "".join(part.text for part in parts).encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell what is no Unicode text
        raise DataError(f"{where}: the text holds half of a surrogate pair (\\ud800 to \\udfff)") from error
    return parts


def _conversation(where: str, document: Mapping[str, Any], template: ChatTemplate) -> list[Part]:
    messages = document["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise DataError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    try:
        parts = template.parts(messages, document.get("tools"))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message of the assistant: nothing to train on")
    return parts


def tokenize_documents(
    tokenizer: Tokenizer, documents: Sequence[Sequence[Part]], *, append_eod: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each document, and the loss mask: a 0 or 1 for each. The first token never counts.

    The text of a special token becomes that token. With ``append_eod`` the end of a document follows it, and counts
    if what is before it does.
    """
    special = special_tokens(tokenizer)
    pattern = re.compile("(" + "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) + ")")
    pieces = [
        [(piece, part.counts) for part in document for piece in pattern.split(part.text) if piece]
        for document in documents
    ]
    plain = [piece for document in pieces for piece, _ in document if piece not in special]
    ids_of_plain = iter(tokenizer.tokenize_batch(plain))
    for document in pieces:
        ids: list[int] = []
        mask: list[int] = []
        for piece, counts in document:
            new = [special[piece]] if piece in special else next(ids_of_plain)
            ids += new
            mask += [int(counts)] * len(new)
        if append_eod:
            ids.append(tokenizer.eod)
            mask.append(mask[-1] if mask else 0)
        yield ids, [0, *mask[1:]] if mask else []
