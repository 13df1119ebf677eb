"""Clients that are slow to send a request: they end in time, and leave room for others."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
import uvicorn

from megatron.tools.serving import server as serving
from megatron.tools.serving.server import Connection, close_overdue

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer open-sesame\r\n" + (
    b'Content-Type: application/json\r\nContent-Length: 3000\r\n\r\n{"prompt": '
)


def test_half_sent_requests_do_not_starve_others(server):
    """More of them than the server keeps open: the oldest are closed."""
    slow = []
    try:
        for _ in range(serving.MOST_CONNECTIONS + 20):
            slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            slow[-1].sendall(HALF)
        assert server.complete(prompt="Hello", max_tokens=12)["choices"]
        assert slow[0].recv(1) == b"", "the oldest is still open"
        slow[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            slow[-1].recv(1)
    finally:
        for connection in slow:
            connection.close()


def test_a_head_that_is_not_sent_ends_the_connection(monkeypatch: pytest.MonkeyPatch):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def talk():
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_level="critical", timeout_keep_alive=3600)
        state = SimpleNamespace(connections=set(), tasks=set(), total_requests=0, default_headers=[])
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        idle, slow, answered = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        slow[1].write(b"GET / HT")
        answered[1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await answered[0].readuntil(b"\r\n\r\n")
        while len(state.connections) < 3:
            await asyncio.sleep(0.01)
        close_overdue(state.connections)
        await asyncio.sleep(0.01)
        assert len(state.connections) == 3, "not yet"
        monkeypatch.setattr(serving, "SEND_SECONDS", 0.0)
        close_overdue(state.connections)
        for reader, writer in (idle, slow, answered):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await asyncio.wait_for(reader.readexactly(1), 10)
            writer.close()
        listening.close()

    asyncio.run(talk())
