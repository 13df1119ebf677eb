"""Guesses what a misspelt name was meant to be."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` most like ``name``, or None where none is much like it."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return matches[0] if matches else None


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str) -> str:
    """The second half of a message about an unknown ``name``: the nearest of ``names``, or what to do ``otherwise``."""
    guess = nearest(name, names)
    return f"did you mean {guess}?" if guess else otherwise
