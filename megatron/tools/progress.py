"""Progress of a tool on stderr: a bar on a terminal; in a pipe or a file plain lines now and then."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_SECONDS = 30.0
"""Between two lines."""
_LINE = "> {desc}{n_fmt} of {total_fmt}{unit} in {elapsed}, {rate_fmt}{postfix}"


class _Lines:
    """Writes what tqdm draws over its last state as a line of its own, if there was progress."""

    def __init__(self, *, draws_start: bool) -> None:
        self._last: str | None = None if draws_start else ""

    def write(self, text: str) -> None:
        """Write the line in ``text``, if there is one."""
        line = text.strip("\r\n ")
        state, _, _ = line.partition(" in ")
        if state and state != self._last:
            if self._last is not None:
                sys.stderr.write(f"{line}\n")
            self._last = state

    def flush(self) -> None:
        """Flush stderr."""
        sys.stderr.flush()


def progress_bar(iterable: Iterable | None = None, *, shown: bool = True, after: float = 10.0, **options: Any) -> tqdm:
    """tqdm's bar, with its ``options``, where stderr is a terminal; otherwise a line each half minute and at the end.

    Nothing is printed if ``shown`` is False, as on other ranks than the first, nor outside of terminals by a job that
    takes less than ``after`` seconds.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, disable=not shown, **options)
    options["desc"] = f"{options['desc']}: " if "desc" in options else ""
    options |= {"unit": options.get("unit", "")}
    options |= {"mininterval": _SECONDS, "maxinterval": _SECONDS, "miniters": 1, "delay": after}
    return tqdm(iterable, disable=not shown, file=_Lines(draws_start=after == 0), bar_format=_LINE, **options)
