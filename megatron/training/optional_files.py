"""Files about a run, which are not worth the run."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unless_refused(what: str) -> Iterator[None]:
    """Warn, and go on, where what is written inside cannot be."""
    try:
        yield
    except OSError as error:
        print(f"  warning: {what} cannot be written ({error.strerror}); training goes on without", flush=True)
