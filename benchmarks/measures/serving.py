"""Tokens per second of eight clients at once, compared with one client that sends the same requests one by one.

Both talk to the same tools/serve.py in a process of its own, which serves a GPT-2 with random weights in fp32, with a
thread for each core. Each request samples with a seed of its own, and each text must be the same every way. CPU time is
that of the server. The limit is to generate the eight texts together without a server.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from benchmarks.comparing import Comparison, Seconds, alternate
from benchmarks.measures.generation import Size, write_model
from benchmarks.measures.whole_program import OF_THIS_PROCESS
from megatron.config import ParallelConfig
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout
from megatron.tools.inference.continuous_batch import Joining
from megatron.tools.inference.decoding import Sampling
from megatron.tools.inference.generator import TextGenerator
from megatron.tools.inference.model import LanguageModel
from megatron.tools.inference.prompts import StoppingCriteria
from megatron.tools.inference.source import open_source
from megatron.tools.inference.weights import load_model

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, LIMIT = 8, "the same without a server"
GOAL = 4.0
"""Times the tokens per second of one client."""
MOST_ROUNDS = 5
"""The larger model takes a quarter of a minute a round."""
SIZES = (Size(6, 256, 16384), Size(12, 768, 50257))


def measure(rounds: int) -> list[Comparison]:
    """Every size, in at most ``MOST_ROUNDS``."""
    silence_known_warnings()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with distributed(ParallelConfig()) as layout, deepspeed_silenced(verbose=False):
        return [found for size in SIZES for found in _of_size(size, min(rounds, MOST_ROUNDS), layout)]


def _of_size(size: Size, rounds: int, layout: ParallelLayout) -> Iterator[Comparison]:
    with TemporaryDirectory() as name:
        write_model(size, Path(name))
        generate = _without_server(Path(name), size, layout)
        with _served(Path(name)) as server, ThreadPoolExecutor(CLIENTS) as clients:
            texts: dict[str, list[str]] = {}

            def timed(way: str) -> Seconds:
                wall, cpu = time.perf_counter(), server.seconds()
                ask, seeds = server.texts_of(size), range(CLIENTS)
                texts[way] = list(clients.map(ask, seeds) if way == "together" else map(ask, seeds))
                return Seconds(time.perf_counter() - wall, server.seconds() - cpu)

            ways: dict[str, Callable[[], Any]] = {way: lambda way=way: timed(way) for way in ("together", "one by one")}
            times = alternate(ways | {LIMIT: lambda: texts.update({LIMIT: generate()})}, rounds)
            if not texts["together"] == texts["one by one"] == texts[LIMIT]:
                raise AssertionError("a text depends on what is generated together")
    what = f"{CLIENTS} clients at once, h {size.hidden}: {size}"
    tokens = CLIENTS * size.new
    yield Comparison(what, "one client", times["together"], times["one by one"], tokens, "tokens", GOAL)
    yield Comparison(what, LIMIT, times["together"], times[LIMIT], tokens, "tokens", is_limit=True)


def _prompt(size: Size, seed: int) -> list[int]:
    return [*(number * 7 % 1000 for number in range(1, size.prompt)), seed]


def _without_server(folder: Path, size: Size, layout: ParallelLayout) -> Callable[[], list[str]]:
    """A function that generates the texts of all clients together."""
    source = open_source(folder)
    model = LanguageModel(load_model(source, layout), source.config, layout.tensor_group)
    generator = TextGenerator(model, source.tokenizer)
    limits = StoppingCriteria(source.config.max_position_embeddings, new_tokens=size.new)

    def generate() -> list[str]:
        batch, texts = generator.batch(), [""] * CLIENTS
        batch.join(*(Joining(n, [_prompt(size, n)], Sampling(seed=n), limits) for n in range(CLIENTS)))
        while batch:
            for number, piece in batch.choose():
                texts[number] += piece.text
            batch.advance()
        return texts

    return generate


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

        def ask(seed: int) -> str:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
            body = {"prompt": _prompt(size, seed), "max_tokens": size.new, "seed": seed}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
            return answer["choices"][0]["text"]

        return ask


@contextmanager
def _served(folder: Path) -> Iterator[_Server]:
    command = [sys.executable, str(ROOT / "tools/serve.py"), "--load", str(folder), "--port", "0"]
    env = {name: value for name, value in os.environ.items() if name not in (*OF_THIS_PROCESS, "OMP_NUM_THREADS")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r" at http://127\.0\.0\.1:(\d+)$", line) for line in process.stdout)))
            yield _Server(int(found[1]), psutil.Process(process.pid))
        finally:
            process.terminate()
