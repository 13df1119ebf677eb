"""Reads a DeepSpeed config file and validates each key. Error messages name the file and the line."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from megatron.common.errors import ConfigError, did_you_mean
from megatron.common.reading import parse_json, read_text

Schema: TypeAlias = Mapping[str, Any]
"""JSON schema of one value (a small subset of the standard). An object without properties accepts any keys.

The schema of a key that is refused has the reason instead, as "refused".
"""

# Generated from the installed DeepSpeed by tools/write_deepspeed_keys.py, so that checks need not import DeepSpeed.
_KEYS = json.loads(Path(__file__).with_name("keys.json").read_text())
TOP_KEYS: Mapping[str, Schema] = _KEYS["keys"]
OPTIMIZERS: Mapping[str, Mapping[str, Schema]] = _KEYS["optimizers"]
"""The parameters of each optimizer that a config may name."""
DEFAULT_OPTIMIZER = "AdamW"
MAX_GRAD_NORM = "max_grad_norm"
"""The old name of "gradient_clipping", a parameter of the optimizer."""

KeyPath: TypeAlias = tuple[str, ...]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')
_DIGITS = 18
"""Maximum digits of an integer: as many as always fit into 64 bits."""
_TOO_LARGE = 2**63
_OFF = (None, False, {"enabled": False})
"""Values with which a refused key is accepted, because it is switched off, as in configs written by DeepSpeed."""
_KEEPS_AUTO = ("data_types", "keep_in_fp32_modules")


def read_config_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """The config in ``path``, and a message for each key that is unknown, refused, duplicate or has a wrong value.

    Keys whose value is wrong or ``"auto"`` are removed from the config. Raises ConfigError if the file is missing,
    unreadable, or not a JSON object.
    """
    text = read_text(path, "--deepspeed_config")
    tree = _parse(path, text)
    lines: dict[KeyPath, int] = {}
    check = _Check(path, lines)
    for key, line in _keys_with_lines(text):
        if key in lines:
            check.problems.append(
                f"{path}, line {line}: {'.'.join(key)} was already given in line {lines[key]}: remove one"
            )
        lines.setdefault(key, line)
    tree = check.section(tree, TOP_KEYS, ())
    check.optimizer(tree)
    return tree, check.problems


def _parse(path: str, text: str) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ConfigError(f"{path}: {constant} is not JSON")

    try:
        tree = parse_json(text, parse_constant=refuse, parse_int=_integer, object_pairs_hook=dict)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a JSON object, which begins with an opening brace")
    return tree


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text):,} digits: write at most {_DIGITS}")
    return int(text)


def _keys_with_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """The path and the line of each key of a JSON text, in order. The items of a list have the keys 0, 1, ..."""
    position: list[str] = []
    in_list: list[bool] = []
    previous: re.Match[str] | None = None
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in "{[":
            position.append("0")
            in_list.append(mark == "[")
        elif mark in "}]":
            position.pop()
            in_list.pop()
        elif mark == "," and in_list[-1]:
            position[-1] = str(int(position[-1]) + 1)
        elif mark == ":" and previous is not None:
            position[-1] = json.loads(previous.group())
            yield tuple(position), text.count("\n", 0, previous.start()) + 1
        previous = token


class _Check:
    """Validates a config against the schemas of its keys, and collects messages."""

    def __init__(self, path: str, lines: Mapping[KeyPath, int]):
        self.path = path
        self.lines = lines
        self.problems: list[str] = []

    def section(self, tree: Mapping[str, Any], keys: Mapping[str, Schema], prefix: KeyPath) -> dict[str, Any]:
        """The valid settings of ``tree``. Invalid ones are reported, and ``"auto"`` is dropped."""
        valid: dict[str, Any] = {}
        for name, value in tree.items():
            key, schema = (*prefix, name), keys.get(name)
            if schema is None:
                candidates = [known for known, other in keys.items() if "refused" not in other]
                guess = did_you_mean(name, candidates, otherwise="DeepSpeed has no such setting")
                self._problem(key, f"unknown key, {guess}")
            elif "refused" in schema:
                if value not in _OFF:
                    self._problem(key, schema["refused"])
            elif value == "auto" and key != _KEEPS_AUTO:
                continue
            elif "properties" in schema:
                if isinstance(value, dict):
                    valid[name] = self.section(value, schema["properties"], key)
                elif value is not None:
                    self._problem(key, f"{json.dumps(value)} must be an object")
            elif _is_number(value) and abs(value) >= _TOO_LARGE:
                self._problem(key, f"{value:g} must be less than 2^63")
            elif not accepts(schema, value):
                self._problem(key, f"{json.dumps(value)} must be {expected(schema)}")
            else:
                valid[name] = int(value) if schema.get("type") == "integer" else value
        return valid

    def optimizer(self, tree: dict[str, Any]) -> None:
        """Check the parameters of the optimizer in ``tree``, or of the default optimizer."""
        optimizer = tree.get("optimizer", {})
        name = optimizer_name(optimizer.get("type", DEFAULT_OPTIMIZER))
        if name is None:
            known = ", ".join(OPTIMIZERS)
            self._problem(("optimizer", "type"), f"{json.dumps(optimizer.pop('type'))} must be one of {known}")
            optimizer.pop("params", None)
        elif "params" in optimizer:
            keys = {**OPTIMIZERS[name], MAX_GRAD_NORM: TOP_KEYS["gradient_clipping"]}
            optimizer["params"] = self.section(optimizer["params"], keys, ("optimizer", "params"))

    def _problem(self, key: KeyPath, text: str) -> None:
        self.problems.append(f"{self.path}, line {self.lines[key]}: {'.'.join(key)}: {text}")


_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, name: _TYPES[name][1](value),
    "anyOf": lambda value, options: any(accepts(option, value) for option in options),
    "enum": lambda value, choices: not isinstance(value, bool) and value in choices,
    "minimum": lambda value, limit: value >= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "items": lambda value, schema: all(accepts(schema, item) for item in value),
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "pattern": lambda value, pattern: re.fullmatch(pattern, value) is not None,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    # 5e8 is a usual bucket size.
    "integer": ("a whole number", lambda value: _is_number(value) and value == int(value)),
    "number": ("a number", _is_number),
    "string": ("a string", lambda value: isinstance(value, str)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "null": ("null", lambda value: value is None),
}
"""Type name to its description and a function that checks a value."""


def accepts(schema: Schema, value: Any) -> bool:
    """Whether ``value`` is valid. Each schema lists ``type`` first; the later checks rely on it."""
    return all(_CHECKS[name](value, limit) for name, limit in schema.items() if name in _CHECKS)


def expected(schema: Schema) -> str:
    """A description of the valid values, such as ``a whole number from 1 on``."""
    if "description" in schema:
        return schema["description"]
    if "anyOf" in schema:
        return ", or ".join(map(expected, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    kind, _ = _TYPES[schema["type"]]
    if "maximum" in schema:
        return f"{kind} from {schema['minimum']:g} to {schema['maximum']:g}"
    return f"{kind} from {schema['minimum']:g} on" if "minimum" in schema else kind


def optimizer_name(text: str) -> str | None:
    """The key of OPTIMIZERS that equals ``text``, ignoring case, or None."""
    return next((name for name in OPTIMIZERS if name.lower() == text.lower()), None)
