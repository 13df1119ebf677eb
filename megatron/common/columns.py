"""Wraps the lines that describe a run at its start."""

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
