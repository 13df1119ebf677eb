"""Checks messages, and renders them with a chat template, which runs in a sandbox process. No torch here."""

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.common.errors import ConfigError, DataError, did_you_mean, one_line
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import check_texts
from megatron.tools.chat import sandbox
from megatron.tools.chat.tokens import Text, special_tokens, tokenize_continuation, tokenize_marked

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages. Others must be named in the chat template."""
TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, beside one without."""
_LONGEST = 1 << 20
"""Maximum characters of a template."""


class ChatTemplate:
    """A Jinja template that renders a conversation as text, as in the tokenizers of Hugging Face models.

    Args:
        source: the Jinja source of the template.
        special: the texts of special tokens by their names in the template, such as ``eos_token``.
        reserved: texts of special tokens, which like its marks only the template may write. Messages that contain one
            are rejected.
        others: further templates of the tokenizer by name; as in transformers, ``tool_use`` renders conversations with
            tools.
        respelled: counts those of these tokens that the tokenizer would make of other spellings in a text.
        added: texts of further tokens, which are reserved if the template writes them between messages.

    Raises ConfigError if it cannot be parsed.

    Attributes:
        marks: texts that the template writes and that look like special tokens, special tokens that it names, and
            ``added`` tokens between messages.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        reserved: Iterable[str] = (),
        others: Mapping[str, str] = MappingProxyType({}),
        respelled: Callable[[str, Collection[str]], Counter[str]] = lambda text, tokens: Counter(),
        added: Iterable[str] = (),
    ) -> None:
        if len(source) > _LONGEST:
            raise ConfigError(f"the chat template has {len(source):,} characters, and may have {_LONGEST:,}")
        self.source, self.special, self.others = source, dict(special), dict(others)
        self._own_roles = frozenset(name for pair in re.findall(r"'(\w+)'|\"(\w+)\"", source) for name in pair if name)
        self._texts = (source, self.special, [*added])
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        try:
            self.marks: list[str] = self._start()
        except DataError as error:
            raise ConfigError(
                f"the chat template cannot be used: {str(error).removeprefix('the chat template').lstrip(': ')}"
            ) from None
        self._names = sorted({*filter(None, reserved), *self.marks}, key=len, reverse=True)
        self._reserved = re.compile("|".join([*map(re.escape, self._names), f"[{sandbox.BEGIN}{sandbox.END}]"]))
        self._respelled = respelled
        tools = others.get(TOOL_USE)
        self._with_tools = None if tools is None else ChatTemplate(tools, special, reserved, {}, respelled, added)
        self.marks += self._with_tools.marks if self._with_tools else []

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Text:
        """Render a conversation; the turns of the assistant count in the loss.

        Raises DataError if the messages are invalid (see ``_checked``), the template rejects the conversation, changes
        earlier turns afterwards, makes a special token of texts, or exceeds the limits of its process.
        """
        if tools is not None and self._with_tools is not None:
            return self._with_tools.conversation(messages, tools)
        text, counted, plain = self._ask("conversation", self._checked(messages, tools), tools)
        self._check_rendered(text, plain)
        return Text(text, counted)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation with the generation prompt at the end. Raises DataError as ``conversation``.

        Newer APIs name the role of the system message ``developer``; it is renamed for templates without that role.
        Arguments of tool calls may be JSON, as in OpenAI's API; templates expect objects.
        """
        known = "developer" in self._own_roles
        named = [
            {**message, "role": "system"} if message.get("role") == "developer" and not known else {**message}
            for message in messages
        ]
        for message in named:
            if isinstance(calls := message.get("tool_calls"), list):
                message["tool_calls"] = [_with_object(call) for call in calls]  # before its texts are checked
        text, plain = self._ask("prompt", self._checked(named, None))
        self._check_rendered(text, plain)
        return text

    def turn_end(self) -> str:
        """The text that the template writes after an answer, without surrounding white space."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\N{SNOWMAN}"}]
        return self._ask("conversation", turns, None)[0].rpartition("\N{SNOWMAN}")[2].strip()

    def _checked(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """The messages with their content as text. Raises DataError for an unknown role, content that is neither text
        nor a list of text parts, and texts of special tokens, which could begin or end turns."""
        checked = []
        for number, message in enumerate(messages, start=1):
            role = message["role"]
            if role not in self._own_roles.union(ROLES):
                known = f"use {', '.join(ROLES)}, or one that the chat template names"
                advice = did_you_mean(role, ROLES, otherwise=known)
                raise DataError(f"the role {one_line(role)[:40]!r} of message {number} is unknown: {advice}")
            for key in ("weight", "train"):
                if message.get(key, 1) != 1:
                    raise DataError(f"message {number} has a {key} other than 1: remove it, or the message")
            for key in ("tool_calls", "function_call"):
                if message.get(key) and key not in self.source:
                    raise DataError(f"message {number} has {key}, which the chat template does not write: use another")
            content = _content(number, message)
            checked.append({**message, "content": content})
            self._check_strings(f"message {number}", [message, content])  # also a token over two parts
        contents = [message["content"] for message in checked]  # a template may join them, trimmed or not
        joined = ["".join(contents), "".join(content.strip() for content in contents)]
        self._check_strings("the text of the messages one after the other", joined)
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise DataError("tools must be a list of objects")
        if tools and "tools" not in self.source:
            raise DataError("there are tools, which the chat template does not write: use another")
        self._check_strings("tools", tools)
        return checked

    def _check_strings(self, where: str, value: Any) -> None:
        for text in _strings(value):
            check_texts([text], f"{where}: ")  # also half of a pair, which would join the half in another message
            for found in (*self._reserved.findall(text), *+self._respelled(text, self._names)):
                token = ascii(found) if found in sandbox.BEGIN + sandbox.END else repr(found)
                raise DataError(f"{where} contains {token}, which only the chat template may write: remove it")

    def _check_rendered(self, text: str, plain: str) -> None:
        """Raises DataError if ``plain``, the text without the punctuation of the messages, has fewer special tokens:
        the template has made one of them, such as by changing or joining texts."""
        for written, own in (
            (Counter(self._reserved.findall(text)), Counter(self._reserved.findall(plain))),
            (self._respelled(text, self._names), self._respelled(plain, self._names)),
        ):
            for token in written - own:
                raise DataError(
                    f"the chat template makes {token!r} of the texts of the messages: remove their part of it"
                )

    def _start(self) -> Any:
        """Start the sandbox process. Returns ``marks``."""
        command = [sys.executable, sandbox.__file__, str(sandbox.MOST_SECONDS)]
        self._owner, self._process = (
            os.getpid(),
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="ascii"
            ),
        )
        weakref.finalize(self, _end, self._process, self._owner)
        return self._ask("template", *self._texts)

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._owner != os.getpid() or self._process is None:  # a forked process starts its own sandbox
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([method, *arguments]) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended: reported below
        except RecursionError:
            raise DataError("the messages are nested too deep") from None
        if not (line := process.stdout.readline()):
            self._process = None
            reason = f"took more than {sandbox.MOST_SECONDS:g} s" if process.wait() == -signal.SIGPROF else "crashed"
            raise DataError(f"the chat template {reason}")
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(f"the chat template: {one_line(answer['error'])}")
        return answer["result"]


def _end(process: "subprocess.Popen[str]", owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _content(number: int, message: Mapping[str, Any]) -> str:
    """The text of a message: its content, the text of the content's parts, or empty for a tool call."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    parts: list[Any] = content if isinstance(content, list) and content else [content]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or part is content:
            kind = part.get("type", part) if isinstance(part, dict) else part
            problem = "missing" if "content" not in message else f"{one_line(json.dumps(kind))[:40]}"
            raise DataError(
                f'the content of message {number} is {problem}: it must be text, or a list of {{"type": "text", '
                '"text": "..."}'
            )
    return "".join(part["text"] for part in parts)


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object instead of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except (ValueError, RecursionError):
        raise DataError("the arguments of a tool call are not JSON") from None


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including keys."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item


class ChatPrompts:
    """Makes prompts with the chat template and the tokenizer of a model.

    Attributes:
        end: id of the special token with which the template ends an answer; None if there is none.
        stop: its text, unless it is the end-of-document token.
        hidden: the special tokens and marks of the template, which no answer has: a message could not contain it.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        special, end = {**special_tokens(tokenizer)}, template.turn_end()
        for mark in template.marks:
            if mark not in special and len(ids := tokenizer.tokenize(mark)) == 1:
                special[mark] = ids[0]
        self.end = next((id for text, id in special.items() if end.startswith(text)), None)
        self.stop = tuple(text for text, id in special.items() if id == self.end != tokenizer.eod)
        self.hidden = tuple(sorted(special, key=len, reverse=True))

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt for the next message of the assistant. Raises DataError as ``ChatTemplate.prompt``."""
        return self.tokenize(self.text(messages))

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The same before it is tokenized."""
        return self._template.prompt(messages)

    def answer(self, messages: Sequence[Mapping[str, Any]], answer: str) -> str:
        """The text that the template adds to the prompt for an answer. Raises as ``ChatTemplate.conversation``."""
        text = self._template.conversation([*messages, {"role": "assistant", "content": answer}]).text
        prompt = self.text(messages)
        if not text.startswith(prompt):
            raise DataError("the chat template does not begin a conversation with the prompt that it writes")
        return text[len(prompt) :]

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text of the template, or a part of one."""
        return tokenize_marked(self._tokenizer, text)

    def tokenize_answer(self, text: str) -> list[int]:
        """Tokenize the result of ``answer``."""
        return tokenize_continuation(self._tokenizer, text)
