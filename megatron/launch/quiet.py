"""Keep the chatter of other libraries off the user's screen."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

_KNOWN_NOISE = (
    r".*all_gather_into_tensor.*",
    r".*c10d::broadcast_.*",
)


def silence_known_warnings() -> None:
    """Filter the warnings that every run would show and a user can do nothing about, by message."""
    for message in _KNOWN_NOISE:
        warnings.filterwarnings("ignore", message=message)


@contextlib.contextmanager
def deepspeed_silenced(verbose: bool) -> Iterator[None]:
    """Keep what DeepSpeed prints, and gloo from C++, off stdout; warnings on stderr are kept."""
    if verbose:
        yield
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.stdout.flush()
    screen = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(screen, 1)
        os.close(screen)
