"""Formats what a run prints: numbers with units, and long lines."""

import textwrap

COLUMNS = 160
"""Maximum width of a line of the log."""


def wrapped(text: str) -> str:
    """``text`` with each line that begins with ``> `` wrapped below its text; a word, such as a path, stays whole.

    A warning stays in one line, as an error does.
    """
    indent = ">" + " " * 11
    wrap = textwrap.TextWrapper(COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(
        wrap.fill(line) if line.startswith("> ") and not line.startswith("> warning: ") else line
        for line in text.split("\n")
    )


_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def prefix_of(value: float) -> tuple[float, str]:
    """Factor and letter of the SI prefix with which ``value`` is at least 1, such as 1e9 and G."""
    return next((row for row in _PREFIXES if value >= 0.9995 * row[0]), _PREFIXES[-1])


def with_prefix(value: float, unit: str) -> str:
    """``value`` in three digits with an SI prefix, such as ``31.4 GB`` or ``1.2 GFLOP/s``."""
    factor, prefix = prefix_of(value)
    digits = ".3g" if value < 999.5 * factor else ",.0f"
    return f"{value / factor:{digits}} {prefix}{unit}"


def duration(seconds: float) -> str:
    """The time of a step, such as ``23.1 s`` or ``87 ms``."""
    return (
        f"{seconds:,.3g} s"
        if 0.9995 <= seconds < 999.5
        else f"{seconds:,.0f} s"
        if seconds > 1
        else f"{seconds * 1000:.3g} ms"
    )
