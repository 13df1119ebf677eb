"""Numbers as a command line has them, and as one reads them: 80GB, 300e9."""

import argparse
import math
import re

_UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BYTES = re.compile(r"([0-9.eE+]+?) *([KMGT]I?B)?", re.IGNORECASE)


def bytes_of_text(text: str) -> float:
    """A number of bytes with its unit, such as 80GB or 141 GiB."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write one such as 80GB or 75GiB")
    return positive(match[1]) * _UNITS[(match[2] or "").upper()]


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def whole(text: str) -> int:
    """A whole number from 1 on."""
    value = positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
    return int(value)


def share(text: str) -> float:
    """A number from 0 on, below 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1, 1 excluded")
    return value


def in_words(size: float) -> str:
    """Bytes in the unit that fits them, such as 31.4 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} B"
