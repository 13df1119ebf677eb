"""Connections of the server: those that are idle or slow to send a request leave room for others."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
"""Open connections; one more closes the one that has been sending its request for the longest."""
SEND_SECONDS = 20.0
"""Time limit for the head of a request, from connecting, or from the response before it."""


class Connection(H11Protocol):
    """A connection as uvicorn handles it, which also knows how long it has waited for a request.

    uvicorn's own limit, ``limit_concurrency``, refuses new requests while old connections are idle; and it has no time
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
    """Close those of ``connections`` on which no request has arrived in time."""
    for connection in list(connections):
        if isinstance(connection, Connection) and connection.is_overdue:
            connection.transport.abort()
