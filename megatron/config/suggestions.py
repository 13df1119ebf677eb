"""Guesses what a misspelt name was meant to be."""

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` most like ``name``, or None where none is much like it."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return matches[0] if matches else None


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str) -> str:
    """The second half of a message about an unknown ``name``: the nearest of ``names``, or what to do ``otherwise``."""
    guess = nearest(name, names)
    return f"did you mean {guess}?" if guess else otherwise


def with_hyphens(words: Sequence[str]) -> list[str]:
    """The words of a command line, with hyphens for the underscores in names of flags."""
    return [_hyphened(word) if word.startswith("--") else word for word in words]


def _hyphened(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
