"""A blend: data sets, and how much each has of the stream of samples."""

import os
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Part(NamedTuple):
    """One data set of a blend."""

    share: Fraction
    """Its share of the samples; those of a blend add up to 1."""
    prefix: str


def read_blend(words: Sequence[str]) -> tuple[Part, ...]:
    """The parts of ``0.3 PREFIX 0.7 PREFIX``, or of a single ``PREFIX``; weights are relative, and taken exactly.

    Raises:
        ValueError: with what is wrong.
    """
    if len(words) == 1:
        return (Part(Fraction(1), words[0]),)
    if len(words) % 2:
        raise ValueError(f"{len(words)} words: give one prefix, or WEIGHT PREFIX for each data set")
    weights = [_read_weight(*pair) for pair in zip(words[::2], words[1::2], strict=True)]
    prefixes = words[1::2]
    places = [os.path.normpath(prefix) for prefix in prefixes]
    if twice := next((prefix for prefix, place in zip(prefixes, places, strict=True) if places.count(place) > 1), None):
        raise ValueError(f"{twice} is there twice: give it once, with the sum of its weights")
    return tuple(Part(weight / sum(weights), prefix) for weight, prefix in zip(weights, prefixes, strict=True))


def _read_weight(text: str, prefix: str) -> Fraction:
    try:
        # A fraction of its own would take any exponent, and then all memory.
        within = 1e-12 <= float(text) <= 1e18
    except ValueError:
        raise ValueError(f"{text} is no number: give a weight before {prefix}") from None
    if not within:
        raise ValueError(f"{text} before {prefix} must be from 1e-12 to 1e18: leave out what is not to be read")
    return Fraction(text)
