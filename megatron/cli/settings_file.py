"""The settings file of ``--config``: YAML with a line ``FLAG: VALUE`` for each flag, read with the line of each.

Only the flat part of YAML is accepted: texts, numbers, true and false, and lists of them. Values are taken as they are
written, so that none of YAML's guesses apply: ``1e-4`` is a number where the flag takes one, ``no`` is a text.
"""

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml

from megatron.cli.layer import Given, is_flag
from megatron.common.errors import ConfigError
from megatron.common.reading import read_bytes
from megatron.config import RunConfig
from megatron.model.spec import architecture_of

_LARGEST = 1 << 18
"""Bytes of a settings file: far more than all flags have."""
_LONGEST = 4096
"""Characters of a value: as many as the name of a file may have."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_settings_file(path: str) -> list[Given]:
    """The settings in ``path``, in order.

    Raises:
        ConfigError: the file is missing or unreadable, or not such a file; the message names the line.
    """
    try:
        text = read_bytes(path, largest=_LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    settings: list[Given] = []
    lines: dict[str, int] = {}
    try:
        for line, name, value in _pairs(path, text):
            if (known := name.replace("_", "-")) in lines:
                _refuse(path, line, f"{name} was already given in line {lines[known]}")
            lines[known] = line
            settings.append(Given(f"--{name}", value, f"{path}, line {line}"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _refuse(path, mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        _refuse(path, text.count("\n", 0, error.position) + 1, f"not YAML: {error.reason}")
    if not settings:
        raise ConfigError(f"{path}: holds no settings: write lines of FLAG: VALUE")
    return settings


def _pairs(path: str, text: str) -> Iterator[tuple[int, str, bool | str | list[str]]]:
    """Line, name and value of each setting. Raises ConfigError and YAMLError."""
    name: str | None = None
    items: list[str] | None = None
    for line, event in _plain_events(path, text):
        if isinstance(event, yaml.SequenceStartEvent):
            if name is None or items is not None:
                _refuse(path, line, "a list is the value of one flag: write FLAG: [VALUE, VALUE]")
            items = []
        elif isinstance(event, yaml.SequenceEndEvent):
            assert name is not None and items is not None, "the parser closes what it has opened"
            if not items:
                _refuse(path, line, f"{name} has no value: write one, or remove the line")
            if flags := [item for item in items if is_flag(item)]:
                _refuse(path, line, f"--{name}: {flags[0]!r} looks like a flag; write a value")
            yield line, name, items
            name, items = None, None
        elif name is None:
            name = _name(path, line, event.value)
        elif items is None:
            yield line, name, _value(path, line, name, event)
            name = None
        else:
            value = _value(path, line, name, event)
            items.append(value if isinstance(value, str) else event.value)


def _plain_events(path: str, text: str) -> Iterator[tuple[int, Any]]:
    """Line and event of each text and list inside the one mapping that a file is. Raises ConfigError for all else."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            _refuse(path, line, "anchors and aliases are not supported: write the value")
        if getattr(event, "tag", None):
            _refuse(path, line, f"the tag {_shown(event.tag)} is not supported: write only the value")
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            _refuse(path, line, "a second document begins here: write one")
        if isinstance(event, yaml.MappingStartEvent):
            depth += 1
            if depth > 1:
                _refuse(path, line, "sections are not supported: write each flag in its own line, not indented")
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent, yaml.SequenceEndEvent)):
            if not depth:
                _refuse(path, line, "not a setting: write lines of FLAG: VALUE")
            yield line, event


def _name(path: str, line: int, text: str) -> str:
    if not _NAME.fullmatch(text):
        _refuse(path, line, f"{_shown(text)} is not the name of a flag: write it without --, then a colon and a space")
    return text


def _value(path: str, line: int, name: str, event: yaml.ScalarEvent) -> bool | str:
    is_plain = event.implicit[0]
    value = _CONSTANTS.get(event.value.lower(), event.value) if is_plain else event.value
    if value is None:
        _refuse(path, line, f"{name} has no value: write one, or remove the line")
    if isinstance(value, str) and not value.isprintable():
        _refuse(path, line, f"{name}: {_shown(value)} has a character that is not printable: remove it")
    if len(event.value) > _LONGEST:
        _refuse(path, line, f"{name}: {len(event.value):,} characters: write at most {_LONGEST:,}")
    return value


def _shown(text: str) -> str:
    """A text of the file for a message of one line."""
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _refuse(path: str, line: int, problem: str) -> NoReturn:
    raise ConfigError(f"{path}, line {line}: {problem}")


def settings_text(run: RunConfig) -> str:
    """A settings file with the flags that ``run`` was given."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in run.settings.items()}
    program = architecture_of(run.model).program
    head = f"# The flags of this run of {program}, from --config and the command line; --config reads them again.\n"
    return head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1 << 20)
