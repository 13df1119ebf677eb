"""Tokens per second of eight clients at once, compared with one client that sends the same requests one by one.

Both talk to the same tools/serve.py in a process of its own, which serves a GPT-2 with random weights in fp32. Each
request samples with a seed of its own, and each text must be the same both ways. CPU time is that of the server.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks.comparing import Comparison, Seconds, alternate
from benchmarks.measures.generation import Size, write_model

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 8
GOAL = 4.0
"""Times the tokens per second of one client."""
MOST_ROUNDS = 5
"""The larger model takes a quarter of a minute a round."""
SIZES = (Size(6, 256, 16384), Size(12, 768, 50257))


def measure(rounds: int) -> list[Comparison]:
    """Every size, in at most ``MOST_ROUNDS``."""
    return [_of_size(size, min(rounds, MOST_ROUNDS)) for size in SIZES]


def _of_size(size: Size, rounds: int) -> Comparison:
    with TemporaryDirectory() as name:
        write_model(size, Path(name))
        with _served(Path(name)) as server, ThreadPoolExecutor(CLIENTS) as clients:
            texts: dict[str, list[str]] = {}

            def timed(way: str) -> Seconds:
                wall, cpu = time.perf_counter(), server.seconds()
                ask, seeds = server.texts_of(size), range(CLIENTS)
                texts[way] = list(clients.map(ask, seeds) if way == "together" else map(ask, seeds))
                return Seconds(time.perf_counter() - wall, server.seconds() - cpu)

            times = alternate({way: lambda way=way: timed(way) for way in ("together", "one by one")}, rounds)
            if texts["together"] != texts["one by one"]:
                raise AssertionError("a text depends on what is generated together")
    what = f"{CLIENTS} clients at once, h {size.hidden}: {size}"
    tokens = CLIENTS * size.new
    return Comparison(what, "one client", times["together"], times["one by one"], tokens, "tokens", GOAL)


@dataclass(frozen=True)
class _Server:
    port: int
    process: psutil.Process

    def seconds(self) -> float:
        """CPU time so far."""
        used = self.process.cpu_times()
        return used.user + used.system

    def texts_of(self, size: Size):
        """A function from a seed to the text of a completion."""
        prompt = [number * 7 % 1000 for number in range(size.prompt)]

        def ask(seed: int) -> str:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
            body = {"prompt": [*prompt[1:], seed], "max_tokens": size.new, "seed": seed}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
            return answer["choices"][0]["text"]

        return ask


@contextmanager
def _served(folder: Path) -> Iterator[_Server]:
    command = [sys.executable, str(ROOT / "tools/serve.py"), "--load", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r" at http://127\.0\.0\.1:(\d+)$", line) for line in process.stdout)))
            yield _Server(int(found[1]), psutil.Process(process.pid))
        finally:
            process.terminate()
