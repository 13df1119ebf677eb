"""Requests of any content are answered: with a completion, or with an error in OpenAI's format; never with 500."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import NUMBERS, TEXTS, VALUES, altered, damaged
from support.served import Words

from megatron.tools.inference.continuous_batch import Piece
from megatron.tools.inference.decoding import Row, Sampling, choose, sample_generator
from megatron.tools.serving.protocol import RequestLimits
from megatron.tools.serving.scheduler import Driver, RankBroadcast, RequestQueue
from megatron.tools.serving.server import Service, build_app

FIELDS = (
    "prompt max_tokens temperature top_k top_p repetition_penalty n stop seed echo stream stream_options user model"
)
BODY: dict[str, Any] = {
    "prompt": ["Hello you", "b"], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1, "n": 2,
    "stop": ["x"], "seed": 5, "stream": False, "stream_options": {"include_usage": True},
}  # fmt: skip
WITH_FIELDS = st.dictionaries(st.sampled_from(FIELDS.split()), NUMBERS | VALUES, max_size=3).map(
    lambda fields: {**BODY, **fields}
)
BODIES = st.one_of(altered(BODY), WITH_FIELDS).map(json.dumps).map(str.encode) | damaged(json.dumps(BODY).encode())
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"host", b"authorization", b"content-type", b"content-length", b"x"]),
        st.binary(max_size=30) | st.sampled_from([b"localhost:80", b"[::1", b"Bearer \xff", b"application/json"]),
    ),
    max_size=2,
)


class Chosen:
    """A batch of what a model with equal and with very different logits would sample, a request at a time."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Piece]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def has(self, number):
        """Whether the request is not finished."""
        return number in self._pieces

    def has_room(self, *requests):
        """Whether there is none, and one joins."""
        return not self._pieces and len(requests) == 1

    def join_requests(self, requests):
        """Choose all tokens."""
        ((number, request),) = requests.items()
        sampling = Sampling(
            greedy=request.temperature == 0,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
        )
        self._pieces[number] = []
        for prompt, tokens in enumerate(request.prompts):
            for logits in (torch.zeros(10), torch.linspace(-1e4, 1e4, 10)):
                row = Row(sampling, sample_generator(sampling.seed, tokens, 0), tokens)
                (token,) = choose(logits.unsqueeze(0), [row])
                self._pieces[number].append(Piece(prompt, 0, token, "x"))

    def leave(self, number):
        """Its client is gone."""
        del self._pieces[number]

    def choose(self):
        """All of them."""
        found = [(number, piece) for number, pieces in self._pieces.items() for piece in pieces]
        self._pieces.clear()
        return found

    def advance(self):
        """Nothing is left to compute."""


async def answer(app: Any, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer of ``app``."""
    sent: list[dict[str, Any]] = []
    parts = iter([body[:7], body[7:]])

    async def receive() -> dict[str, Any]:
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": part is not body[7:] and part != body[7:]}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers],
    }
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@given(st.lists(st.tuples(BODIES, HEADERS), min_size=1, max_size=3), TEXTS)
def test_requests(requests: list[tuple[bytes, list[tuple[bytes, bytes]]]], name: str) -> None:
    async def talk() -> list[tuple[int, bytes]]:
        queue = RequestQueue(most_waiting=2, seconds=20)
        service = Service("my", 0, Words(), RequestLimits(64, 32, 4), None, 4000, None, local_only=True)  # type: ignore[arg-type]
        group = SimpleNamespace(size=lambda: 1)
        driver = asyncio.create_task(asyncio.to_thread(Driver(queue, Chosen(), RankBroadcast(group)).run))  # type: ignore[arg-type]
        app = build_app(service, queue)
        answers = [answer(app, "/v1/completions", headers, body) for body, headers in requests]
        answered = asyncio.gather(*answers, answer(app, f"/v1/models/{name}", [], b""))
        try:
            await asyncio.wait({answered, driver}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert answered.done(), "the driver has ended" if driver.done() else "no answer in 30 s"
            return answered.result()
        finally:
            queue.jobs.put(None)
            await driver  # which raises what ended it

    for status, content in asyncio.run(talk()):
        assert status in (200, 400, 403, 404, 405, 413, 415, 503), content
        if status != 200:
            error = json.loads(content)["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
            assert len(error["message"].splitlines()) == 1
        elif content.startswith(b"data: "):
            assert content.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"]
