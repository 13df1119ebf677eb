"""Program of the process that runs an untrusted chat template; requests and answers are lines of JSON.

The Jinja sandbox gives a template no access to files and network. The process has ``MOST_SECONDS`` of CPU time for a
request, after which the kernel ends it, and ``MOST_BYTES`` of memory. It imports no other module of ``megatron``.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, Undefined, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SECONDS = 5.0
MOST_BYTES = 1 << 30
MOST_LETTERS = 1 << 27
"""Maximum number of characters in an answer."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Unicode noncharacters around what an assistant generates. Messages that contain them are rejected earlier."""
_TAG = re.compile(r"\w.*[^\w\s]|[^\w\s].*\w", re.DOTALL)
"""A word with punctuation: other added tokens, such as of blanks or ``###``, are in ordinary texts."""
_CONTENTS = ["qxz0", "qxz1", "qxz2", "qxz3"]
_EXAMPLE = [
    {"role": role, "content": content}
    for role, content in zip(("system", "user", "assistant", "user"), _CONTENTS, strict=True)
]
_MARK = re.compile(r"<\|[^\s|<>]+\|>|<\uff5c[^\s\uff5c<>]+\uff5c>|<(?:start|end)_of_\w+>|</?s>")

Text = tuple[str, list[tuple[int, int]], str]
"""A text, the ranges of characters that count in the loss, and the text without the punctuation of the messages."""


class Template:
    """A Jinja template with the settings of transformers, but without the date, random numbers and addresses."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written
        )
        del environment.filters["random"], environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._special = dict(special)
        self._marks_answers = any(node.name == "_marked" for node in self._tree.find_all(nodes.ExtensionAttribute))

    def marks(self, added: Sequence[str]) -> list[str]:
        """Texts in the form of special tokens, such as ``<|im_start|>``, in literals of the template and around example
        messages, the special tokens that it uses by name, and those of ``added`` that it writes between messages."""
        literals = [node.data for node in self._tree.find_all(nodes.TemplateData)]
        literals += [str(node.value) for node in self._tree.find_all(nodes.Const)]
        examples = [*self._examples()]
        written = [*literals, *(part for parts in examples for part in parts[::2])]
        used = meta.find_undeclared_variables(self._tree) & self._special.keys()
        names = {self._special[name] for name in used}.union(*map(_MARK.findall, written))
        ends = _between_messages(examples) or literals
        names.update(name for name in added if _TAG.search(name) and any(name in text for text in ends))
        return sorted(names - {""})

    def _examples(self) -> Iterator[list[str]]:
        """Example conversations as the template writes them, split at the contents of the messages."""
        for messages in (_EXAMPLE, _EXAMPLE[1:]):
            try:
                text = self._render(messages, None, add_generation_prompt=True)
            except Exception:  # such as of a template that knows no system
                continue
            yield re.split(f"({'|'.join(_CONTENTS)})", text)

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> Text:
        """Render a conversation; the turns of the assistant count in the loss.

        A turn is the text inside ``{% generation %}``. In templates without it, a turn is what the template adds to
        the previous messages with the generation prompt.

        Raises ValueError if this cannot be told, or if the template cannot write messages without punctuation.
        """
        _Generation.blocks = 0
        text = self._render(messages, tools)
        if self._marks_answers:
            pieces = re.split(f"({BEGIN}|{END})", text)
            blocks = len(pieces) // 4
            if pieces[1::2] != [BEGIN, END] * blocks or blocks < _Generation.blocks:
                raise ValueError("{% generation %} blocks are nested, or cut by the template")
            ends = [0]
            for piece in pieces[::2]:
                ends.append(ends[-1] + len(piece))
            counted = list(zip(ends[1::2], ends[2::2], strict=False))
            return "".join(pieces[::2]), counted, self._without_punctuation(messages, tools)
        counted = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], tools, add_generation_prompt=True)
            answered = self._render(messages[: number + 1], tools)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise ValueError(
                    f"writes message {number + 1} in another way when others follow, or without the prompt for it: put "
                    "{% generation %} and {% endgeneration %} around answers in the template"
                )
            counted.append((len(prompt), len(answered)))
        return text, counted, self._without_punctuation(messages, tools)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Render a conversation with the generation prompt at the end, also without the punctuation of the messages.
        Raises ValueError as ``conversation``."""
        text = re.sub(f"[{BEGIN}{END}]", "", self._render(messages, None, add_generation_prompt=True))
        return text, self._without_punctuation(messages, None, add_generation_prompt=True)

    def _without_punctuation(self, messages: Sequence[Mapping[str, Any]], tools: Any, **settings: bool) -> str:
        try:
            return self._render(_plain(messages), _plain(tools), **settings)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:
            raise ValueError(
                f"cannot write the messages without their punctuation ({error}), as a check does"
            ) from None

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, add_generation_prompt: bool = False) -> str:
        return self._template.render(
            self._special,
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )


class _Generation(Extension):
    """Jinja extension for ``{% generation %}...{% endgeneration %}`` around what an assistant generates."""

    tags = {"generation"}
    blocks = 0
    """Blocks that were rendered."""

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        _Generation.blocks += 1
        return f"{BEGIN}{caller()}{END}"


def _between_messages(examples: Sequence[list[str]]) -> list[str]:
    """The texts between the messages of an example: a message with a token of them would end its own turn. Empty if no
    example has each message once.

    Answers may have other tokens that the template knows, such as ``<think>``: in front of an answer only those count
    that are also in front of the next one.
    """
    for parts in examples:
        if sorted(parts[1::2]) in (_CONTENTS, _CONTENTS[1:]):
            before = 2 * parts[1::2].index(_CONTENTS[2])
            return [*parts[:before:2], commonprefix([parts[before], parts[-1]]), *parts[before + 2 : -1 : 2]]
    return []


def _plain(value: Any, key: str = "") -> Any:
    """A value of JSON with a dot for each punctuation mark in texts, except in names such as roles."""
    if isinstance(value, dict):
        return {name: _plain(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_name = not isinstance(value, str) or key in ("role", "type") or re.fullmatch(r"[\w.-]*", value)
    return value if is_name else re.sub(r"[^\w\s]", "\N{MIDDLE DOT}", value)


def _written(value: Any) -> Any:
    """The value of an expression, if it is a value of JSON or undefined; of others Python writes the address."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict | Undefined):
        return value
    raise TypeError(f"writes a {type(value).__name__}, which is no text")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def main(seconds: float) -> None:
    """Answer requests, which are a method name and its arguments; the first one builds the template."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(hard, MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal: the parent handles it
    template = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            name, *arguments = json.loads(line)
            if name == "template":
                *texts, added = arguments
                template = Template(*texts)
                result: Any = template.marks(added)
            else:
                result = getattr(template, name)(*arguments)
            answer = json.dumps({"result": result})
            if len(answer) > MOST_LETTERS:
                raise MemoryError
        except MemoryError:
            answer = json.dumps({"error": f"needs more than {MOST_BYTES >> 20} MiB of memory"})
        except RecursionError:
            answer = json.dumps({"error": "is nested too deep, or calls itself without end"})
        except Exception as error:  # expressions in a template may raise anything
            answer = json.dumps({"error": f"{str(error)[:1000] or type(error).__name__}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
