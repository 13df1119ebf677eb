"""Reads and writes the settings file of ``--config``: YAML with a line ``FLAG: VALUE`` for each flag.

Only flat YAML is accepted: strings, numbers, true and false, and lists of them. The type of the flag decides how a
value is parsed, not YAML's rules: ``1e-4`` is a number if the flag takes one, ``no`` is a string.
"""

import re
from typing import NoReturn
from unicodedata import category

import yaml

from megatron.cli.layer import Given, is_flag
from megatron.common.errors import ConfigError
from megatron.common.reading import read_text
from megatron.config import RunConfig
from megatron.model.spec import architecture_of

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "bool", "null", "int", "float", "timestamp", "seq", "map", "merge", "value")
)
"""YAML's standard tags, which it also assigns to values without a tag. Others are refused, such as !!python/tuple."""
_CONSTANTS = {"true": True, "false": False, "null": None, "~": None, "": None}


def read_settings_file(path: str) -> list[Given]:
    """The settings in ``path``, in order. Raises ConfigError, with the line, unless it is a readable settings file."""
    text = read_text(path, "--config")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.composer.ComposerError as error:
        _refuse(path, error.problem_mark, "a second document begins here: write one")
    except yaml.MarkedYAMLError as error:
        _refuse(path, error.problem_mark or error.context_mark, f"not YAML: {error.problem or error.context}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}, line {line}: not YAML: {error.reason}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep: write lines of FLAG: VALUE") from None
    if root is None:
        raise ConfigError(f"{path}: has no settings: write lines of FLAG: VALUE")
    if not isinstance(root, yaml.MappingNode):
        _refuse(path, root.start_mark, "not a setting: write lines of FLAG: VALUE")
    settings: list[Given] = []
    marks: dict[str, yaml.Mark] = {}
    for key, node in root.value:
        for each in (key, node, *(node.value if isinstance(node, yaml.SequenceNode) else ())):
            if each.tag not in _TAGS:
                _refuse(path, each.start_mark, f"the tag {each.tag!r} is not supported: write the value without it")
        name = key.value if isinstance(key.value, str) else "a list"
        if not _NAME.fullmatch(name):
            problem = f"{name!r} is not the name of a flag: write it without --, then a colon and a space"
            _refuse(path, key.start_mark, problem)
        if (known := name.replace("_", "-")) in marks:
            _refuse(path, key.start_mark, f"{name} was already given in line {marks[known].line + 1}: remove one")
        marks[known] = key.start_mark
        settings.append(Given(f"--{name}", _value(path, name, node), f"{path}, line {node.start_mark.line + 1}"))
    return settings


def _value(path: str, name: str, node: yaml.Node) -> bool | str | list[str]:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(path, name, node)
    if isinstance(node, yaml.MappingNode):
        _refuse(path, node.start_mark, "sections are not supported: write each flag in its own line, not indented")
    if not node.value:
        _refuse(path, node.start_mark, f"{name} has no value: write one, or remove the line")
    for item in node.value:
        if not isinstance(item, yaml.ScalarNode):
            _refuse(path, item.start_mark, "a list is the value of one flag: write FLAG: [VALUE, VALUE]")
        _scalar(path, name, item)
        if is_flag(item.value):
            _refuse(path, item.start_mark, f"--{name}: {item.value!r} looks like a flag; write a value")
    return [item.value for item in node.value]


def _scalar(path: str, name: str, node: yaml.ScalarNode) -> bool | str:
    value = _CONSTANTS.get(node.value.lower(), node.value) if node.style is None else node.value
    if value is None:
        _refuse(path, node.start_mark, f"{name} has no value: write one, or remove the line")
    if isinstance(value, str) and any(char == "\0" or category(char) == "Cs" for char in value):  # no argument has them
        _refuse(path, node.start_mark, f"{name}: {value!r} has a character that is not printable: remove it")
    return value


def _refuse(path: str, mark: yaml.Mark | None, problem: str) -> NoReturn:
    raise ConfigError(f"{path}, line {mark.line + 1 if mark else 1}: {problem}") from None


def settings_text(run: RunConfig) -> str:
    """The text of a settings file with the flags of ``run``."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in run.settings.items()}
    program = architecture_of(run.model).program
    head = f"# The flags of this run of {program}, from --config and the command line; --config reads them again.\n"
    return head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1 << 20)
