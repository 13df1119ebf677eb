"""The server: connections that are idle or slow leave room for others, and a thread of its own generates."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.common.processes import ExitSignal
from megatron.tools.serving.request_queue import RequestQueue
from megatron.tools.serving.scheduler import RankBroadcast, RequestBatch, run_driver, run_worker


def serve(
    app: FastAPI,
    listener: socket.socket,
    queue: RequestQueue,
    batch: RequestBatch,
    ranks: RankBroadcast,
    *,
    grace: float,
    threads: int,
) -> None:
    """Answer on ``listener`` until SIGTERM or SIGINT, then finish open requests for at most ``grace`` seconds.

    A thread of its own generates, and computes with ``threads`` of torch's threads.

    Raises the error that ended the generator's thread, if that ended first.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace) + 5,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # uvicorn handles them, and raises them again after its shutdown

    def generate() -> None:
        torch.set_num_threads(threads)
        run_driver(queue, batch, ranks)

    generator = _GeneratorThread(generate)
    _Server(config, queue, generator, grace).run([listener])
    if generator.error:
        raise generator.error


def serve_worker(batch: RequestBatch, ranks: RankBroadcast) -> None:
    """Run the other ranks. After a signal they continue until the first rank ends, or until a second signal."""
    ExitSignal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_worker(batch, ranks)


class _GeneratorThread(threading.Thread):
    """A thread that keeps the error that ended it."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="generator", daemon=True)
        self.error: Exception | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error


class _Server(uvicorn.Server):
    """Shuts down when the generator's thread ends, and ends that thread when it shuts down."""

    def __init__(self, config: uvicorn.Config, queue: RequestQueue, generator: _GeneratorThread, grace: float) -> None:
        super().__init__(config)
        self._queue, self._generator, self._grace = queue, generator, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._generator.start()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        close_overdue(self.server_state.connections)
        return not self._generator.is_alive() or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._queue.end_all(self._grace if self._generator.is_alive() else 0, "the server is shutting down")
        await super().shutdown(sockets)
        self._queue.jobs.put(None)
        await asyncio.to_thread(self._generator.join)


MOST_CONNECTIONS = 512
"""Open connections; one more closes the one that has been sending its request for the longest."""
SEND_SECONDS = 20.0
"""Time limit for the head of a request, from connecting, or from the response before it."""


class Connection(H11Protocol):
    """A connection as uvicorn handles it, which also knows how long it has waited for a request.

    uvicorn's own limit, ``limit_concurrency``, rejects new requests while old connections are idle; and it has no time
    limit for the head of a request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the oldest unfinished connection if there are too many."""
        super().connection_made(transport)
        self._since = time.monotonic()
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_ones) > MOST_CONNECTIONS:
            unfinished = [each for each in open_ones if isinstance(each, Connection) and each.is_unfinished]
            min(unfinished, key=lambda each: each._since).transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._since = time.monotonic()

    @property
    def is_unfinished(self) -> bool:
        """Whether no request was sent, or not all of it."""
        return self._waits_for_head or self.cycle.more_body

    @property
    def is_overdue(self) -> bool:
        """Whether the head of a request was not sent in time. For the body, the application has its own limit."""
        return self._waits_for_head and time.monotonic() - self._since > SEND_SECONDS

    @property
    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


def close_overdue(connections: Iterable[Any]) -> None:
    """Close the connections on which no request has arrived in time."""
    for connection in list(connections):
        if isinstance(connection, Connection) and connection.is_overdue:
            connection.transport.abort()
