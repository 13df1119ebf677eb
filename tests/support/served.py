"""A started tools/serve.py, and what a client may do with it."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from subprocess import Popen
from typing import Any

from support.programs import TIME_LIMIT, Programs

from megatron.tokenizer import Tokenizer


class Words(Tokenizer):
    """A tokenizer that makes a token of each word."""

    vocab_size, eod = 10, 9

    def _encode(self, texts):
        """The length of each word, cut off at 9."""
        return [[min(len(word), 9) for word in text.split()] for text in texts]

    def _decode(self, ids):
        """That many letters."""
        return " ".join("x" * id for id in ids)


@dataclass(frozen=True)
class Served:
    """Where a server listens, and the key that it asks for."""

    port: int
    key: str
    process: Popen

    @property
    def url(self) -> str:
        """The address of its page."""
        return f"http://127.0.0.1:{self.port}/"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> HTTPResponse:
        """The answer, of which no more than the head is read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIME_LIMIT)
        sent = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {name: value for name, value in sent.items() if value})
        return connection.getresponse()

    def open(self, **fields: Any) -> HTTPResponse:
        """The answer to a completion with these fields, as it begins."""
        return self.request("POST", "/v1/completions", json.dumps(fields).encode())

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion, whole."""
        response = self.open(**fields)
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def texts(self, **fields: Any) -> list[str]:
        """The text of each choice of a completion."""
        return [choice["text"] for choice in self.complete(**fields)["choices"]]

    def load(self) -> dict[str, int]:
        """Running and waiting requests, by the server's metrics."""
        lines = self.request("GET", "/metrics", Authorization="").read().decode().splitlines()
        return {
            name: int(value)
            for name, value in (line.rsplit(maxsplit=1) for line in lines)
            if name.startswith("num_requests")
        }

    def wait_for(self, **load: int) -> None:
        """Wait until so many requests are running or waiting. The test's time limit ends a wait in vain."""
        while not load.items() <= self.load().items():
            time.sleep(0.05)

    def send(self, **fields: Any) -> socket.socket:
        """Ask for a completion and do not wait for the answer."""
        body = json.dumps(fields)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIME_LIMIT)
        head = [
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        connection.sendall("\r\n".join([*head, "", body]).encode())
        return connection


def events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """What server-sent events say, one by one, up to the last."""
    for line in response:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line.removeprefix(b"data: "))


@contextmanager
def served(programs: Programs, log: Path, *command: str | Path, key: str = "", **environ: str) -> Iterator[Served]:
    """A server from the moment it listens; ``command`` starts it."""
    environ |= {"SERVE_API_KEY": key} if key else {}
    with programs.started(log, *command, "--port", "0", **environ) as process:
        end = time.monotonic() + TIME_LIMIT
        while (found := re.search(r" at http://127\.0\.0\.1:(\d+)$", log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield Served(int(found[1]), key, process)
