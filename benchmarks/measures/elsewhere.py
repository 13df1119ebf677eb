"""A separate process for other implementations, so that this project's allocator settings do not affect them."""

import os
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.comparing import Seconds, timed

Ways = Mapping[str, Callable[[], Any]]


class Elsewhere:
    """Ways that a process has made from ``build(*arguments)``, and takes the time of, one call after the other."""

    def __init__(self, build: Callable[..., Ways], *arguments: Any):
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def way(self, name: str) -> Callable[[], Seconds]:
        """One of them, to be called from here."""

        def call() -> Seconds:
            self._pipe.send(name)
            return self._pipe.recv()

        return call

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, build: Callable[..., Ways], arguments: tuple[Any, ...]) -> None:
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)  # torch asks for it with its first tensor
    ways = build(*arguments)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(timed(ways[name]))
