"""Output of DeepSpeed, gloo and torch that no user can act on."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def silence_known_warnings() -> None:
    """Filter, by message, warnings of torch that every run would print.

    DeepSpeed: comm/torch.py and runtime/pipe/p2p.py call deprecated functions of torch.distributed.
    Test: tests/launch/test_launchers.py. Remove when DeepSpeed no longer calls them.
    """
    for message in (r".*all_gather_into_tensor.*", r".*c10d::broadcast_.*"):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def deepspeed_silenced(verbose: bool) -> Iterator[None]:
    """Keep the prints of DeepSpeed and of gloo (from C++) off stdout unless ``verbose``. DeepSpeed's errors stay.

    DeepSpeed: prints hundreds of lines while an engine is built, some of them not through its logger.
    Test: tests/launch/test_launchers.py. Remove when one log level silences all of it.
    """
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
