"""One rank that answers, with a thread that computes; the others compute along."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from megatron.launch.processes import ExitSignal
from megatron.tools.serving.request_queue import Complete, Desk, Ranks, follow, lead

_IDLE_CONNECTIONS = 64
"""Connections beside those of requests that wait: browsers keep some open, health checks come and go."""


def serve(app: FastAPI, listener: socket.socket, desk: Desk, complete: Complete, ranks: Ranks, *, grace: float) -> None:
    """Answer on ``listener`` until SIGTERM or SIGINT, and then finish for at most ``grace`` seconds what has begun.

    Raises what ended the computing, if that ended first.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=desk.most_waiting + _IDLE_CONNECTIONS,
        timeout_graceful_shutdown=int(grace) + 5,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # uvicorn takes them, and raises them once more when all is done
    computing = _Computing(lambda: lead(desk.jobs, complete, ranks))
    _Server(config, desk, computing, grace).run([listener])
    if computing.error:
        raise computing.error


def compute_along(complete: Complete, ranks: Ranks) -> None:
    """What the other ranks do. Asked to leave they stay until the first one leaves, or they are asked again."""
    ExitSignal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(complete, ranks)


class _Computing(threading.Thread):
    """A thread that keeps the error that ended it."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="computing", daemon=True)
        self.error: Exception | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error


class _Server(uvicorn.Server):
    """Leaves when nobody computes any more; nobody computes any more when it has left."""

    def __init__(self, config: uvicorn.Config, desk: Desk, computing: _Computing, grace: float) -> None:
        super().__init__(config)
        self._desk, self._computing, self._grace = desk, computing, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._computing.start()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        return not self._computing.is_alive() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._desk.end_all(self._grace if self._computing.is_alive() else 0, "the server is leaving")
        await super().shutdown(sockets)
        self._desk.jobs.put(None)
        await asyncio.to_thread(self._computing.join)
