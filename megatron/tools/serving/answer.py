"""The body of a response in the format of OpenAI's API, whole or as server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from megatron.tools.inference.continuous_batch import Piece
from megatron.tools.serving.request import CompletionRequest, RequestError

_KINDS = {401: "authentication_error", 500: "server_error", 503: "server_error", 504: "server_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of OpenAI's API."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class Answer:
    """The response to one request, as one body or as server-sent events. The choices of the first prompt come first."""

    def __init__(self, request: CompletionRequest, model: str) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        echoed = request.texts if request.echo else [""] * len(request.prompts)
        self._beginnings = [text for text in echoed for _ in range(request.n)]
        self._tokens = 0

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """The complete response."""
        choices = [_choice(index, text) for index, text in enumerate(self._beginnings)]
        async for piece in pieces:
            choice = choices[self._count(piece)]
            choice["text"] += piece.text
            choice["finish_reason"] = piece.finish_reason
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """A server-sent event for each piece that is not empty. An error is the last event."""
        for index, text in enumerate(self._beginnings):
            if text:
                yield self._event([_choice(index, text)])
        try:
            async for piece in pieces:
                index = self._count(piece)
                if piece.text or piece.finish_reason:
                    yield self._event([_choice(index, piece.text, piece.finish_reason)])
        except RequestError as error:
            yield _line(error_body(error))
            return
        if self._request.include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _count(self, piece: Piece) -> int:
        """Counts the token of a piece. Returns the index of its choice."""
        self._tokens += piece.token is not None
        return piece.prompt * self._request.n + piece.sample

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._request.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return _line({**self._head, "choices": choices, **more})


def _choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
